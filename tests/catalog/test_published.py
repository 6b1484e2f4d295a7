"""Adapters at addresses: fetched once for a machine, by digest, within bounds, and from nowhere else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_app.catalog.adapters import MAX_CONFIG_BYTES
from serve_app.catalog.cache import BYTES, PLACE, AdapterCache, CacheFull
from serve_app.catalog.fetching import failure
from serve_app.catalog.files import CatalogError
from serve_app.catalog.published import PublishedFiles
from serve_app.catalog.sources import parse_source
from serve_app.core.errors import InvalidRequest, Unavailable
from tests.catalog.web import Web, serving


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as made:
        yield made


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], PLACE: str(tmp_path / "cache")}


@pytest.fixture
def files(environ: dict[str, str]) -> Iterator[PublishedFiles]:
    made = PublishedFiles(environ)
    yield made
    made.close()


def versions_in(environ: dict[str, str]) -> set[str]:
    return {each.name for each in Path(environ[PLACE]).iterdir() if each.is_dir()}


# Addresses


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/../other",
        "s3://bucket/a/./b",
        "s3://bucket/%2e%2e/b",
        "s3://bucket//a",
        "s3://bucket/a\\..\\b",
        "s3://bucket/a::file://b",
        "s3://key:secret@bucket/a",
        "s3://bucket:80/a",
        "https://host/a?X-Amz-Signature=abc",
        "https://host/a#b",
        "https://user:pass@host/a",
        "https://host.example\n/a",
        "https:///a",
        "http://host.example/a",
        "http://169.254.169.254/latest",
        "hf://datasets/owner/name",
        "file:///etc",
        "memory://a/b",
        "ftp://host/a",
        "s3://" + "a" * 2000,
    ],
)
def test_an_address_that_could_mean_something_else_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(CatalogError) as refused:
        parse_source(text)
    assert not any(secret in str(refused.value) for secret in ("secret", "abc", "pass@"))


@pytest.mark.parametrize(
    ("root", "text", "is_below"),
    [
        ("s3://bucket/team/", "s3://bucket/team/sql", True),
        ("s3://bucket", "s3://bucket/team/sql/", True),
        ("s3://bucket/team", "s3://bucket/team", False),
        ("s3://bucket/team", "s3://bucket/teammate/sql", False),
        ("s3://bucket/team", "s3://Bucket/team/sql", False),
        ("s3://bucket/team", "gs://bucket/team/sql", False),
        ("https://host/a", "https://HOST/a/b", True),
        ("https://host/a", "https://host:8443/a/b", False),
        ("https://host/a", "https://host.evil.example/a/b", False),
        ("hf://owner", "hf://owner/name@v1", True),
        ("hf://owner/name", "hf://owner/name@v1/sub", True),
        ("hf://owner/name", "hf://owner/named@v1/sub", False),
        ("hf://owner/name@v1", "hf://owner/name@v2/sub", False),
    ],
)
def test_what_lies_below_a_listed_address(root: str, text: str, is_below: bool) -> None:
    assert parse_source(root).covers(parse_source(text)) == is_below


# Fetching


def test_what_is_fetched_is_read_as_from_a_folder_and_only_once(
    web: Web, files: PublishedFiles, environ: dict[str, str]
) -> None:
    version = files.fetch(web.put("sql", b"weights"))
    asked = web.num_asked
    another = PublishedFiles(environ)
    record = another.read(f"{web.url}/sql", "sql", version)
    assert (record.version, record.path, web.num_asked) == (version, Path(environ[PLACE]) / version, asked)
    assert versions_in(environ) == {version}


def test_many_that_want_a_version_at_once_fetch_it_once(web: Web, environ: dict[str, str]) -> None:
    url = web.put("sql", b"weights")
    elsewhere = PublishedFiles({**environ, PLACE: environ[PLACE] + "-of-another-machine"})
    version = elsewhere.fetch(url)
    once = web.num_asked
    readers = [PublishedFiles(environ) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        records = list(threads.map(lambda each: each.read(url, "sql", version), readers))
    assert [each.version for each in records] == [version] * 4
    assert web.num_asked == 2 * once


def test_a_version_that_is_there_counts_though_the_address_has_changed(web: Web, files: PublishedFiles) -> None:
    version = files.fetch(web.put("sql", b"v1"))
    assert files.read(web.put("sql", b"v2"), "sql", version).version == version


def test_files_that_have_changed_are_a_record_of_another_version(
    web: Web, files: PublishedFiles, environ: dict[str, str]
) -> None:
    other = files.read(web.put("sql", b"v1"), "sql", "0" * 32)
    assert other.version not in ("", "0" * 32)
    assert versions_in(environ) == set()


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ({"/sql/adapter_config.json": (404, b"")}, "(404)"),
        ({"/sql/adapter_model.safetensors": (403, b"")}, "(403)"),
        ({"/sql/adapter_model.safetensors": (302, b"http://127.0.0.1:1/")}, "redirects"),
        ({"/sql/adapter_config.json": (302, b"/other")}, "redirects"),
        ({"/sql/adapter_config.json": (200, b" " * (MAX_CONFIG_BYTES + 1))}, "allowed"),
    ],
)
def test_what_cannot_be_fetched_is_refused_with_the_reason(
    web: Web, files: PublishedFiles, environ: dict[str, str], spoilt: dict[str, tuple[int, bytes]], reason: str
) -> None:
    url = web.put("sql", b"weights")
    web.answers.update(spoilt)
    with pytest.raises(InvalidRequest) as refused:
        files.fetch(url)
    assert reason in str(refused.value)
    assert refused.value.param == "lora_path"
    assert versions_in(environ) == set()


def test_a_server_that_says_no_size_is_refused(web: Web, files: PublishedFiles) -> None:
    url = web.put("sql", b"weights")
    web.hides_sizes = True
    with pytest.raises(InvalidRequest, match="how large"):
        files.fetch(url)


def test_a_server_that_fails_or_is_gone_is_worth_another_try(web: Web, files: PublishedFiles) -> None:
    url = web.put("sql", b"weights")
    web.answers["/sql/adapter_config.json"] = (500, b"")
    with pytest.raises(Unavailable, match="status 500"):
        files.fetch(url)
    with pytest.raises(Unavailable, match="ConnectionRefused"):
        files.fetch("http://127.0.0.1:1/sql")


def test_a_server_that_never_answers_is_left(web: Web, environ: dict[str, str]) -> None:
    url = web.put("sql", b"weights")
    with web.standing(), pytest.raises(Unavailable, match="within 2 s"):
        PublishedFiles(environ, fetch_s=2.0).fetch(url)
    assert versions_in(environ) == set()


def test_a_secret_of_the_machine_is_not_told() -> None:
    source = parse_source("s3://bucket/sql")
    error = OSError("signed by hunter2hunter2 at https://host/a?X-Amz-Signature=deadbeef")
    told = json.dumps(failure(error, source, {"AWS_SECRET_ACCESS_KEY": "hunter2hunter2"}))
    assert "hunter2" not in told
    assert "deadbeef" not in told


# The cache


def put(cache: AdapterCache, version: str, num_bytes: int) -> None:
    """Keep a version as a process that has ended since."""
    other = AdapterCache(cache.place, cache.max_bytes)
    with other.unfinished() as folder:
        AdapterCache(cache.place, cache.max_bytes).reserve(folder, {"weights": num_bytes})
        other.keep(folder, version)
    other.close()


def version(number: int) -> str:
    return f"{number:x}" * 32


def test_what_was_used_least_recently_goes_first_and_what_is_held_stays(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 300)
    for number in (1, 2, 3):
        put(cache, version(number), 100)
        os.utime(tmp_path / version(number), (number, number))
    holder = AdapterCache(tmp_path, 300)
    assert holder.hold(version(1)) is not None
    os.utime(tmp_path / version(1), (1, 1))
    put(cache, version(4), 100)
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} == {version(1), version(3), version(4)}
    with pytest.raises(CacheFull, match=BYTES):
        put(cache, version(5), 250)
    holder.release(version(1))
    put(cache, version(5), 250)
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} == {version(5)}
    assert holder.hold(version(1)) is None


def test_what_a_dead_process_left_half_fetched_goes(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path, 1000)
    left = tmp_path / ("unfinished-" + "0" * 15)
    left.mkdir()
    (left / "weights").write_bytes(b"x" * 990)
    with AdapterCache(tmp_path, 1000).unfinished() as running:
        put(cache, version(1), 100)
        assert running.is_dir()
    assert not left.exists()


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    error = OSError(28, "No space left on device")
    assert "disk" in failure(error, parse_source("s3://bucket/sql"), {})["reason"]
