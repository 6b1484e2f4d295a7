"""Sixteen things are closed unless somebody opens them. The doctor has a check for each, and sees it opened."""

from __future__ import annotations

import ast
import http.server
import inspect
import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from serve_app.check.cluster_file import check_file
from serve_app.check.document import Severity
from serve_app.cli.doctor import doors
from serve_app.cli.doctor import kept as kept_checks
from serve_app.cli.doctor.facts import Answer, Facts
from serve_app.cli.doctor.kept import DEBUG_SWITCHES
from serve_app.cli.doctor.probes import tried
from serve_app.cli.doctor.report import CHECKS, examine, object_of
from serve_app.core.tenants import Limits, Tenant
from serve_app.observe.lines import VARIABLE as LOG_MESSAGES
from serve_app.tenants.opening import PepperState
from tests.cli.served import serving
from tests.cli.test_doctor import (
    BOSS,
    DASHBOARD,
    FOUND,
    FRIENDS,
    SOUND_FACTS,
    answering,
    kept,
    limits,
    listening,
    outside,
    unasked,
)

BOUND = Limits(tokens_per_minute=1)


def with_switch(name: str) -> Facts:
    return replace(SOUND_FACTS, environment={"RAY_AUTH_MODE": "token", name: "1"})


def tenant(**changes: Any) -> Facts:
    return kept(tenants=(Tenant(name="acme", limits=BOUND, **changes), Tenant(name="beta", limits=BOUND)))


def complaining(folder: Path, **args: object) -> Facts:
    """What the check says of a cluster file whose model has these `args` besides."""
    content = yaml.safe_load((Path(__file__).parents[2] / "cluster.yaml").read_text(encoding="utf-8"))
    content["applications"][1]["args"] |= args
    (folder / "cluster.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    lines = check_file(str(folder / "cluster.yaml")).lines
    return replace(SOUND_FACTS, complaints=tuple(line for line in lines if ": error: " in line))


SWITCHES: dict[str, list[tuple[str, Facts]]] = {
    "loopback": [("bind", unasked(outside(SOUND_FACTS))), ("tls", outside(SOUND_FACTS))],
    "nobody unnamed but on loopback": [
        ("bind", unasked(outside(SOUND_FACTS))),
        ("routes", replace(SOUND_FACTS, anonymous={("GET", "/v1/models"): 200})),
    ],
    "Ray's token": [
        ("ray-token", replace(SOUND_FACTS, environment={"RAY_AUTH_MODE": "disabled"})),
        ("ray-dashboard", listening(DASHBOARD, ray_answers={"http://127.0.0.1:8265/api/jobs/": 200})),
    ],
    "keys as digests under a pepper, that end": [
        ("pepper", kept(pepper=PepperState(source="file", mode=0o640))),
        ("keys", kept(keys=(replace(BOSS, expires_at=None),))),
    ],
    "safetensors alone": [("models", replace(SOUND_FACTS, pickles=("m/pytorch_model.bin",)))],
    "no code of models": [("debug", with_switch("TRANSFORMERS_TRUST_REMOTE_CODE"))],
    "no address is fetched": [("addresses", replace(SOUND_FACTS, was_fetched=True))],
    "adapters by name": [("adapters", answering(place=Answer(status=200)))],
    "caches by tenant": [("tenants", kept(tenants=FRIENDS))],
    "bounds of every number": [("limits", limits(max_n=100_000))],
    "caps on bodies and headers": [
        ("bodies", answering(large_body=None)),
        ("headers", answering(long_headers=Answer(status=200))),
    ],
    "routes closed by default": [("routes", replace(SOUND_FACTS, anonymous={("GET", "/metrics"): 200}))],
    "no prompt in a log": [("texts", tenant(log_texts=0.25)), ("debug", with_switch(LOG_MESSAGES))],
    "secrets that nothing shows": [("store", kept(has_password=True))],
    "errors without stacks": [("errors", answering(nowhere=Answer(status=500, body="Traceback")))],
    "pages of our own, which others may not read": [
        ("pages", answering(console=Answer(status=200))),
        ("cors", answering(strange_page=Answer(status=200, headers={"access-control-allow-origin": "*"}))),
        ("cors", tenant(cors_origins=("*",))),
    ],
}
OPENED = [(switch, check, facts) for switch, ways in SWITCHES.items() for check, facts in ways]


@pytest.mark.parametrize(("switch", "check", "facts"), OPENED, ids=[f"{switch}-{check}" for switch, check, _ in OPENED])
def test_a_switch_that_is_opened_is_found_by_its_check(switch: str, check: str, facts: Facts) -> None:
    assert check in {each.check for each in examine(facts)}
    assert check in {each.name for each in CHECKS}


def test_there_are_sixteen_of_them() -> None:
    assert len(SWITCHES) == 16


@pytest.mark.parametrize("name", DEBUG_SWITCHES)
def test_each_switch_for_developers_is_found_by_its_name(name: str) -> None:
    (verdict,) = examine(with_switch(name))
    assert (verdict.check, verdict.commands[0]) == ("debug", f"unset {name}")
    assert verdict.found.startswith(f"{name}=1: ")


def test_every_verdict_that_a_check_may_give_is_given_to_something_that_is_tried() -> None:
    places = {
        (each.__file__, node.lineno)
        for each in (doors, kept_checks)
        for node in ast.walk(ast.parse(inspect.getsource(each)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("error", "warning", "note", "verdict")
    }
    tried_ones = [*(facts for facts, *_ in FOUND), *(facts for _, _, facts in OPENED)]
    passed: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        passed.add((frame.f_code.co_filename, frame.f_lineno))
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        told = {each.check for facts in tried_ones for each in examine(facts)}
    finally:
        sys.settrace(before)
    assert places - passed == set()
    assert told == {each.name for each in CHECKS}


def test_a_tenant_whose_pages_are_anybodys_is_named() -> None:
    (verdict,) = examine(tenant(cors_origins=("https://app.example.org", "*")))
    assert (verdict.check, verdict.severity) == ("cors", Severity.WARNING)
    assert "acme" in verdict.found
    assert "beta" not in verdict.found
    assert examine(tenant(cors_origins=("https://app.example.org",))) == []


def test_a_tenant_whose_texts_are_logged_is_named_with_its_share() -> None:
    (verdict,) = examine(tenant(log_texts=0.25))
    assert (verdict.check, verdict.severity) == ("texts", Severity.NOTE)
    assert "acme are logged, 0.25 of" in verdict.found


def test_no_option_of_a_model_lets_its_code_run(tmp_path: Path) -> None:
    (verdict,) = [each for each in examine(complaining(tmp_path, trust_remote_code=True)) if each.check == "file"]
    assert "trust_remote_code" in verdict.found


def test_what_was_found_was_looked_at() -> None:
    """Of the store something is seen where no service runs, too."""
    facts = Facts(store=tenant(cors_origins=("*",)).store)
    told: Any = object_of(facts, examine(facts), 3)
    assert [each["was_looked_at"] for each in told["checks"] if each["findings"]] == [True]


def test_a_service_of_ours_follows_neither_an_address_nor_a_folder() -> None:
    with serving() as served:
        place, was_fetched = tried(served.url, None)
    assert place is not None
    assert (place.status, was_fetched) == (404, False)
    assert [body["model"] for body in served.recorded.bodies] == ["demo:../doctor", "demo"]
    assert served.backend.submissions == []


class Obliging(http.server.BaseHTTPRequestHandler):
    """Has a model, takes any name, and fetches what it is told to."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "demo:pirate"}, {"id": "demo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        for message in body.get("messages", ()):
            (address,) = (part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url")
            with pytest.raises((urllib.error.URLError, TimeoutError)):
                urllib.request.urlopen(address, timeout=0.1)
        self._answer({})

    def _answer(self, content: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *said: Any) -> None:
        pass


@contextmanager
def obliging() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Obliging)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_service_that_follows_both_is_seen_to() -> None:
    with obliging() as url:
        place, was_fetched = tried(url, None)
    assert place is not None
    assert (place.status, was_fetched) == (200, True)


def test_where_no_model_may_be_used_nothing_is_tried() -> None:
    assert tried("http://127.0.0.1:1", None) == (None, False)
