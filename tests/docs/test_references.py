"""What the documents refer to is there: files, headings, tests, commands, settings, names in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from serve_app.api.dialects import Dialect
from serve_app.deployments.arguments import CanarySettings, LimitSettings, ModelArgs, RouterSettings
from tests.docs.contract import bodies
from tests.docs.markdown import SECTION
from tests.docs.operations import subcommands
from tests.docs.sections import REPOSITORY

DOCUMENTS = sorted(
    file
    for file in REPOSITORY.rglob("*.md")
    if not any(part.startswith(".") for part in file.relative_to(REPOSITORY).parts)
)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"!\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")
MAX_PICTURE_BYTES = 150_000
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|toml|html)")
TEST = re.compile(r"(?P<file>tests/[\w/]+\.py)::(?P<name>test_\w+)")
CITED = re.compile(r"docs/(?P<page>[\w/-]+\.md)#(?P<anchor>[\w-]+)")
SNAKE = re.compile(r"\b_?[a-z]+(?:_[a-z0-9]+)+\b")
NAME_IN_FILE = re.compile(r"`(?P<name>\w+)(?:\.(?P<member>\w+))?`\s(?:in\s|\()`(?P<file>[\w/]+\.py)`")
CONSTANT = re.compile(r"\b[A-Z]+(?:_[A-Za-z0-9]+)+\b")
CLASS = re.compile(r"[A-Z]\w+(?:\.\w+)*")
RAYS_OWN = frozenset(
    {
        "RAY_SERVE_HAPROXY_METRICS_PORT",
        "RAY_SERVE_HAPROXY_STATS_PORT",
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
        "RAY_USE_TLS",
        "RAY_gcs_storage_path",
        "RAY_worker_killing_policy_by_group",
        "max_replicas_per_node",
        "num_gpus",
        "ssl_certfile",
        "ssl_keyfile",
    }
)
"""Settings of Ray that no code of ours sets."""
PLANNED = frozenset({"AttentionPlan"})
"""Names that docs/step.md gives to what is to come."""


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def in_code(text: str) -> Iterator[str]:
    """What a document sets in code: spans, and lines of shell."""
    yield from CODE.findall(FENCE.sub("", text))
    for fence in FENCE.finditer(text):
        if fence["language"] in ("sh", ""):
            yield from fence["body"].splitlines()


def anchor_of(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def anchors(file: Path) -> frozenset[str]:
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    return frozenset(anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@cache
def words_of_code() -> frozenset[str]:
    """Every name in code, tests, settings and the Makefile."""
    files = [REPOSITORY / name for name in ("Makefile", "pyproject.toml", "cluster.yaml", "constraints.txt")]
    for folder in ("serve_app", "tests", "benchmarks"):
        files += [each for each in (REPOSITORY / folder).rglob("*.py") if each.parent.name != "docs"]
    files += (REPOSITORY / "serve_app").rglob("*.yaml")
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return frozenset(re.findall(r"\w+", text))


@cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_relative_links_lead_somewhere(file: Path) -> None:
    for link in LINK.finditer(FENCE.sub("", file.read_text(encoding="utf-8"))):
        path, _, anchor = link["target"].partition("#")
        if "://" in path:
            continue
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), f"there is no {path}"
        assert not anchor or anchor in anchors(target), f"{name_of(target)} has no heading #{anchor}"


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_pictures_are_there_and_drawn_ones_are_right_in_the_dark(file: Path) -> None:
    for picture in PICTURE.finditer(file.read_text(encoding="utf-8")):
        target = file.parent / picture["target"]
        assert target.exists(), f"there is no {target}"
        assert target.stat().st_size <= MAX_PICTURE_BYTES
        assert len(picture["words"]) > 20, "who does not see it reads what it shows"
        if target.suffix == ".svg":
            drawn = ElementTree.parse(target)  # raises where it is not well formed
            assert "prefers-color-scheme: dark" in "".join(drawn.getroot().itertext())


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(file: Path) -> None:
    roots = (REPOSITORY, REPOSITORY / "serve_app", file.parent)
    for span in CODE.findall(FENCE.sub("", file.read_text(encoding="utf-8"))):
        if FILE.fullmatch(span.partition("::")[0]):
            assert any((root / span.partition("::")[0]).exists() for root in roots), f"there is no {span}"


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_tests_that_are_named_exist(file: Path) -> None:
    for found in TEST.finditer(file.read_text(encoding="utf-8")):
        assert found["name"] in functions_of(REPOSITORY / found["file"]), found.group()


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_commands_that_are_named_exist(file: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = {name for name, _ in subcommands()}
    for code in in_code(file.read_text(encoding="utf-8")):
        for target in re.findall(r"(?:^|[\s(])make ([a-z-]+)", code):
            assert target in targets, f"make {target}"
        for command in re.findall(r"(?:^|[\s(\"'])serve_app ([a-z]+)", code):
            assert command in commands, f"serve_app {command}"


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_settings_that_are_given_a_value_exist(file: Path) -> None:
    known = {
        name for model in (ModelArgs, RouterSettings, LimitSettings, CanarySettings) for name in model.model_fields
    }
    known |= set(bodies()["union"]["chat"]["parameters"])
    known |= set(bodies()["union"]["parameters"]) | {field.name for field in fields(Dialect)}
    known |= set(re.findall(r"^[\s-]*(\w+):", (REPOSITORY / "cluster.yaml").read_text(encoding="utf-8"), re.MULTILINE))
    for span in CODE.findall(FENCE.sub("", file.read_text(encoding="utf-8"))):
        if (found := re.fullmatch(r"([a-z]+(?:_[a-z]+)+): \S+", span)) is not None:
            assert found[1] in known | RAYS_OWN, span


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_names_in_code_are_names_of_the_code(file: Path) -> None:
    named: set[str] = set()
    written = SECTION.sub("", FENCE.sub("", file.read_text(encoding="utf-8")))
    for span in CODE.findall(written):
        if not FILE.search(span):
            named |= {*SNAKE.findall(span), *CONSTANT.findall(span)}
            named |= set(span.split(".")) if CLASS.fullmatch(span) else set()
    assert sorted(named - words_of_code() - RAYS_OWN - PLANNED) == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=name_of)
def test_a_name_that_is_said_to_be_in_a_file_is_there(file: Path) -> None:
    for found in NAME_IN_FILE.finditer(FENCE.sub("", file.read_text(encoding="utf-8"))):
        (there,) = (
            root / found["file"] for root in (REPOSITORY / "serve_app", REPOSITORY) if (root / found["file"]).exists()
        )
        words = re.findall(r"\w+", there.read_text(encoding="utf-8"))
        assert {found["name"], found["member"] or found["name"]} <= set(words), found.group()


def test_headings_that_code_cites_exist() -> None:
    sources = [each for folder in ("serve_app", "tests", "benchmarks") for each in (REPOSITORY / folder).rglob("*.py")]
    cited = {found.groups() for each in sources for found in CITED.finditer(each.read_text(encoding="utf-8"))}
    assert len(cited) > 3
    for page, anchor in cited:
        assert anchor in anchors(REPOSITORY / "docs" / page), f"{page} has no heading #{anchor}"


def test_a_heading_has_the_anchor_that_github_gives_it() -> None:
    assert anchor_of("Contracts of the key/value store") == "contracts-of-the-keyvalue-store"
    assert anchor_of("`best_of`, and more") == "best_of-and-more"
