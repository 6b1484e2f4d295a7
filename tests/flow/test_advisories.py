"""What was found in systems like this one, tried on this one. Each test names where it was found.

Those of a room of their own stand there: pickled weights and configs that run code in tests/catalog, expressions that
blow up in tests/constraints, names of special tokens in tests/templates, keys in statements in
tests/flow/test_admin.py, secrets in logs in tests/flow/test_canaries.py, Ray's dashboard in
tests/cluster/test_up.py.
"""

from __future__ import annotations

import json
import select
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from serve_app.api.paths import OPEN, SERVICES, AdminPath, Path
from serve_app.core.errors import InvalidRequest, NotFound
from serve_app.core.prompt import ImageCard
from serve_app.core.tenants import Scope
from serve_app.http.app import routes
from serve_app.http.guard import Door
from serve_app.http.metrics import Metrics
from serve_app.http.middleware import REFUSED
from serve_app.http.settings import HttpSettings
from serve_app.router.router import Router
from serve_app.tenants.store import Author
from tests.fakes import FakeBackend, model_card, replica_card
from tests.flow.test_admin import House, address, bearing, client, house  # noqa: F401
from tests.pictures import sent

JSON = {"content-type": "application/json"}
BODY = {"model": "tiny", "prompt": "a", "max_tokens": 2}
WALK = [*((path, path.method) for path in Path), *SERVICES]


def key_for(scope: Scope, of: House) -> dict[str, str]:
    """Headers with a key that is for that alone."""
    by = Author(name="test", at=0.0)
    return bearing(str(of.admin_service.answer("create_key", {"tenant": "acme", "scopes": [scope]}, by)["key"]))


def test_the_walk_has_every_route_that_is_served(house: House) -> None:  # noqa: F811
    """A key that guarded some prefixes and left others open: vLLM's `--api-key` and /invocations, /pause, /tokenize."""
    router = Router(house.fleet)
    door = Door(identify=lambda key: None, administer=house.administer)  # type: ignore[arg-type, return-value]
    served = routes(router, HttpSettings(), Metrics(house.fleet), door, batches=house.batches)
    assert all(isinstance(each, Route) for each in served)
    walked = {(path.replace("}", ":path}") if isinstance(path, Path) else path.value, m) for path, m in WALK}
    assert {(each.path, method) for each in served for method in (each.methods or set()) - {"HEAD"}} == walked


@pytest.mark.parametrize(("path", "method"), WALK, ids=lambda each: str(each))
async def test_a_key_is_good_for_the_routes_of_its_scope_and_no_others(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    path: Path | AdminPath,
    method: str,
) -> None:
    """Every route by every scope. As in LiteLLM, where a key for one thing did another."""
    house.key("acme")
    target = address(path.replace("{id}", "tiny").replace("{file}", "console.js") if isinstance(path, Path) else path)
    for scope in Scope:
        answer = await client.request(method, target, headers=key_for(scope, house), content=b"")
        is_allowed = path in OPEN or path.scope in (None, scope)
        assert (answer.status_code not in (401, 403)) is is_allowed, (scope, answer.text)
    assert ((await client.request(method, target)).status_code != 401) is (path in OPEN)


HEADERS_OF_SERVE = [*REFUSED, *(name.replace("-", "_") for name in REFUSED)]


@pytest.mark.parametrize("name", HEADERS_OF_SERVE)
async def test_no_header_of_a_client_steers_serve(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    name: str,
) -> None:
    """Ray Serve obeys a client's own time limit, and goes on for a client that left, where a header says so."""
    refused = await client.post("/v1/completions", json=BODY, headers={**house.key("acme"), name.upper(): "30"})
    assert refused.status_code == 400
    assert house.backend.submissions == []


HUGE = [
    {"n": 16_384 * 1024},
    {"n": 2**31, "best_of": 2**31},
    {"n": 128, "prompt": ["a"] * 256, "max_tokens": 512},
    {"n": 128, "max_tokens": 2**40},
    {"logprobs": 10**9},
    {"stop": ["x"] * 100_000},
    {"prompt": [["a"]] * 10_000},
    {"prompt": [1] * 2_000_000},
    {"logit_bias": {str(token): 1 for token in range(50_000)}},
]


@pytest.mark.parametrize("more", HUGE, ids=lambda each: "+".join(each))
async def test_no_number_of_a_request_takes_memory_before_it_is_bounded(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    more: dict[str, object],
) -> None:
    """One request with a large `n` took all of a host's memory, before the queue: vLLM, CVE-2026-34756."""
    headers, sent = house.key("acme") | JSON, json.dumps(BODY | more).encode()
    tracemalloc.start()
    try:
        answer = await client.post(
            "/v1/completions", content=sent, headers={**headers, "content-type": "application/json"}
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code in (400, 413)
    assert house.backend.submissions == []
    assert peak < 4_000_000 + 20 * len(sent)


class Endless:
    """A body that never ends; counts what was taken of it."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __aiter__(self) -> Endless:
        return self

    async def __anext__(self) -> bytes:
        self.num_bytes += 1000
        return b" " * 1000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/admin/tenants"])
async def test_no_more_of_a_body_is_read_than_it_may_have(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    path: str,
) -> None:
    """Media was read whole before any limit, and /tokenize asked for no key: vLLM, CVE-2026-100650."""
    body, headers = Endless(), bearing(house.admin) if path.startswith("/admin") else house.key("acme")
    answer = await client.post(path, content=body, headers={"content-type": "application/json", **headers})
    assert answer.status_code == 413
    assert body.num_bytes <= 50_000 + 2000
    before = body.num_bytes
    assert (await client.post(path, content=body)).status_code == 401
    assert body.num_bytes <= before + 1000, "who has no key has nothing read"


ADDRESSES = ["http://127.0.0.1:{port}/api/jobs/", "HTTP://localhost:{port}/x.png", "file:///etc/passwd", "FILE:x.png"]
ADDRESSES += ["//127.0.0.1:{port}/y.png", " http://127.0.0.1:{port}/", "data:text/uri-list,http://127.0.0.1:{port}/"]


@pytest.mark.parametrize("url", ADDRESSES)
async def test_no_address_of_a_client_is_fetched(house: House, client: httpx.AsyncClient, url: str) -> None:  # noqa: F811
    """Loaders fetched what a request named: vLLM, CVE-2026-22773; Ray's dashboard, CVE-2023-48023."""
    seeing = replace(model_card("seeing"), images=ImageCard(), chat_template="{{ messages }}")
    backend = FakeBackend(replica_card("r1", seeing))
    house.fleet.put(backend.card, backend)
    headers = house.key("acme")
    with socket.create_server(("127.0.0.1", 0)) as named:
        for (path, body), place in in_every_place(url.format(port=named.getsockname()[1])):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == place
            assert "must be the base64 of a PNG" in error["message"], "the address itself was looked at"
        assert select.select([named], [], [], 0)[0] == [], "somebody came to the address"
    assert backend.submissions == []
    for (path, body), _ in in_every_place(sent(1)):
        answer = await client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, "a picture in that place is seen"


def in_every_place(url: str) -> Iterator[tuple[tuple[str, dict[str, object]], str]]:
    """A route and a body for each place of an image, and its name."""
    text = {"type": "text", "text": "a"}
    for image, name in (({"url": url}, "image_url.url"), (url, "image_url")):
        parts = [text, {"type": "image_url", "image_url": image}]
        chat = {"model": "seeing", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        yield (Path.CHAT, chat), f"messages[0].content[1].{name}"
    yield (Path.COMPLETIONS, {"model": "seeing", "prompt": "<image>", "images": [url], "max_tokens": 1}), "images[0]"


ESCAPES = [
    *(
        "../sql",
        "..",
        ".",
        "/etc/passwd",
        "sql/../../x",
        "sql\0",
        "%2e%2e%2fsql",
        "..\\sql",
        "\\\\host\\share",
        "~/sql",
    ),
    *("file:///etc/passwd", "http://127.0.0.1/x", "s3://bucket/x", "ｓｑｌ", "sql\u202e", "sq\u0131l", "SQL"),
]


@pytest.mark.parametrize("name", ESCAPES)
async def test_an_adapter_is_named_and_never_a_place(house: House, client: httpx.AsyncClient, name: str) -> None:  # noqa: F811
    """A path or an address as the name of an adapter left the folder and the tenant: LoRAX #798."""
    headers = house.key("acme")
    for named in ({"model": f"tiny:{name}"}, {"adapter": name}, {"lora": [{"id": name, "scale": 1}]}):
        answer = await client.post("/v1/completions", json=BODY | named, headers=headers)
        assert answer.status_code in (400, 403, 404), answer.text
    assert house.backend.submissions == []


@given(name=st.text(min_size=1, max_size=40).filter(lambda name: name not in ("sql", "")))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_name_at_all_leads_out_of_the_adapters(house: House, name: str) -> None:  # noqa: F811
    """The same, of any text: LoRAX #798."""
    router = Router(house.fleet)
    with suppress(InvalidRequest, NotFound):
        assert {part.adapter for part in router.view.resolve(f"tiny:{name}").parts} <= {"sql"}


async def test_a_page_is_sent_whole_whatever_range_is_asked_for(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
) -> None:
    """Many ranges took a server's time in joining them: Starlette, CVE-2025-62727."""
    headers = house.key("acme")
    whole = await client.get("/docs", headers=headers)
    ranges = "bytes=" + ",".join(f"{at}-{at}" for at in range(5000))
    answer = await client.get("/docs", headers={**headers, "range": ranges})
    assert (answer.status_code, answer.content) == (200, whole.content)
    assert "accept-ranges" not in answer.headers


@pytest.mark.parametrize("path", ["/slots", "/slots/0?action=restore", "/slots/0?action=save", "/lora-adapters"])
async def test_no_state_of_a_client_is_read_or_written(house: House, client: httpx.AsyncClient, path: str) -> None:  # noqa: F811
    """A file of keys and values that a client named was read into memory: llama.cpp, CVE-2026-21869, CVE-2026-43629."""
    answer = await client.post(path, json={"filename": "x.bin"}, headers=house.key("acme"))
    assert answer.status_code in (404, 405)
