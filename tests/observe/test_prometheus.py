"""The rules and boards in a real Prometheus, which scrapes a served stack under a little load."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml

from serve_app.core.cards import Scale
from serve_app.engine.speculation import speculator
from serve_app.engine.speculation.speculator import StepCosts
from serve_app.observe.__main__ import write
from tests.flow.stack import Stack, running_stack
from tests.observe.queries import BOARDS, REPOSITORY, RULES, every_query, filled_in, rules, selected, variables_of
from tests.ports import held_port

NUM_SCRAPES = 6
SCRAPE_S = 0.25
NUM_TRIES = 20
UNSEEN = {"ServeAppGone", "ServeAppModelWithoutReplica"}
"""Alerts of what is missing: nothing that they select is missing here."""
TOLD = "The cat sat on the mat. " * 8


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs {program}: apt-get install prometheus")


@needs("promtool")
def test_promtool_finds_rules_and_configuration_sound(tmp_path: Path) -> None:
    write(tmp_path)
    for what, file in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
        checked = subprocess.run(["promtool", "check", what, tmp_path / file], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_what_is_written_names_the_service_and_the_prometheus_that_were_asked_for(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "serve_app.observe", tmp_path, "--target", "[::1]:9000", "--prometheus", "http://p:1"],
        check=True,
    )
    read = {file.parent.name: yaml.safe_load(file.read_text()) for file in tmp_path.rglob("*.yaml")}
    [job] = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["[::1]:9000"]}]
    assert read["datasources"]["datasources"][0]["url"] == "http://p:1"
    [provider] = read["dashboards"]["providers"]
    assert {file.stem for file in Path(provider["options"]["path"]).iterdir()} == {"service", "replicas", "tenants"}


def test_prometheus_presents_a_key_where_its_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, key_file="/keys/of prometheus")
    [job] = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials_file": "/keys/of prometheus"}


@needs("promtool")
def test_alerts_fire_where_they_are_due_and_nowhere_else() -> None:
    examples = Path(__file__).parent / "rules_test.yaml"
    tested = subprocess.run(["promtool", "test", "rules", examples], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_examples_of_both() -> None:
    examples = yaml.safe_load((Path(__file__).parent / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
    well, *ill = examples
    quiet = {each["alertname"] for each in well["alert_rule_test"] if not each["exp_alerts"]}
    loud = {each["alertname"] for test in ill for each in test.get("alert_rule_test", ()) if each["exp_alerts"]}
    loud |= {name for name in quiet if f'alertname="{name}"' in yaml.safe_dump(ill).replace("\\", "")}
    assert quiet == loud == {rule["alert"] for rule in rules() if "alert" in rule}


def test_the_command_writes_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "serve_app.observe", str(tmp_path / "new")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    assert f"--config.file={tmp_path}/new/prometheus.yaml" in said
    assert (tmp_path / "new" / "rules.yaml").read_bytes() == RULES.read_bytes()
    written = {file.name: file.read_bytes() for file in (tmp_path / "new" / "boards").iterdir()}
    assert written == {file.name: file.read_bytes() for file in BOARDS}


@asynccontextmanager
async def listening(stack: Stack) -> AsyncIterator[int]:
    """The stack on a port of this machine."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(stack.app, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def prometheus(scraped: int, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus with the shipped configuration, on other ports and in a hurry."""
    write(folder)
    config = yaml.safe_load((folder / "prometheus.yaml").read_text(encoding="utf-8"))
    interval = f"{SCRAPE_S * 1e3:.0f}ms"
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{scraped}"]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with held_port() as port:
        command = [
            "prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            process.terminate()
            await process.wait()


async def asked(client: httpx.AsyncClient, expr: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query, samples that are numbers alone."""
    response = await client.get("/api/v1/query", params={"query": expr})
    answer = response.json()
    assert answer["status"] == "success", f"{expr}: {answer}"
    found = answer["data"]["result"]
    return [each for each in found if each["value"][1] != "NaN"]


async def returns_data(client: httpx.AsyncClient, query: str) -> bool:
    """Whether it does at some time soon: a scrape that a busy machine answers late leaves everything stale until the
    next one."""
    for _ in range(NUM_TRIES):
        if await asked(client, query):
            return True
        await asyncio.sleep(SCRAPE_S)
    return False


async def load(stack: Stack) -> None:
    """Completions that queue, hit prefixes, are guessed rightly and have shadows, a refusal, and what replicas say."""
    stack.fleet.rename({"prod": {"to": "demo", "shadow": {"demo:pirate": 100}}})
    told = (await stack.complete(model="prod", prompt=TOLD, max_tokens=24))["choices"][0]["text"]
    guessed = {"temperature": 0, "prediction": {"type": "content", "content": told}}
    bodies: list[dict[str, Any]] = [
        {"model": "demo", "prompt": TOLD, "max_tokens": 24, **guessed},
        {"model": "demo:pirate", "prompt": TOLD, "max_tokens": 8},
        {"model": "prod", "prompt": [f"Story {number}" for number in range(4)], "max_tokens": 6},
        {"model": "nobody", "prompt": "x"},
    ]
    await asyncio.gather(*(stack.post(body) for body in bodies), moved(stack))
    stack.fleet.expect(["demo"], (), {"demo": Scale(wanted=2, starting=0, draining=0)})
    await stack.greet()


async def moved(stack: Stack) -> None:
    """A completion that goes on at the other replica, as the one that has it leaves."""
    asking = asyncio.create_task(stack.post({"model": "demo", "prompt": "Once", "min_tokens": 48, "max_tokens": 48}))
    busy: list[int] = []
    while not (busy or asking.done()):
        await asyncio.sleep(0)
        busy = [number for number, service in enumerate(stack.services) if service.num_open]
    for number in busy[:1]:
        stack.fleet.remove(f"replica-{number}")
    assert (await asking).status_code == 200


async def scrapes(client: httpx.AsyncClient) -> int:
    """How many have come; 0 where Prometheus does not listen yet, or listens and is not ready to answer."""
    with suppress(httpx.TransportError):
        if (await client.get("/-/ready")).status_code != httpx.codes.OK:
            return 0
        found = await asked(client, "count_over_time(serve_app_replica_flow_rows_total[5m])")
        return max((int(each["value"][1]) for each in found), default=0)
    return 0


@pytest.mark.slow
@needs("prometheus")
async def test_every_query_of_every_rule_and_board_returns_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepCosts, "extra_s", lambda *_: 0.0)  # else it is the machine's to say whether any is guessed
    monkeypatch.setattr(speculator, "MOST_LOOKING", float("inf"))  # where a step of the demo is short nobody looks
    async with (
        running_stack(num_replicas=2, threads=1) as stack,
        listening(stack) as port,
        prometheus(port, tmp_path) as client,
        asyncio.timeout(240),
    ):
        for _ in range(NUM_SCRAPES):
            before = await scrapes(client)
            await load(stack)
            while await scrapes(client) <= before + 1:  # noqa: ASYNC110
                await asyncio.sleep(SCRAPE_S)
        empty = [
            f"{query.place}: {query.expr}"
            for query in every_query()
            if query.place.partition(": ")[2] not in alerts() and not await returns_data(client, filled_in(query.expr))
        ]
        assert empty == []
        await check_choices(client)
        await check_rules(client)


async def check_choices(client: httpx.AsyncClient) -> None:
    """The variables of boards have values."""
    for file in BOARDS:
        for series, label in variables_of(file).values():
            values = (await client.get(f"/api/v1/label/{label}/values", params={"match[]": series})).json()["data"]
            assert values, f"{file.stem}: {label}"


async def check_rules(client: httpx.AsyncClient) -> None:
    """All were evaluated without an error, and every series that an alert looks at is there."""
    groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
    states = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert len(states) == len(rules())
    assert set(states.values()) == {"ok"}
    for rule in rules():
        if rule.get("alert") not in UNSEEN:
            for series in selected(rule["expr"]):
                assert await returns_data(client, series.name), f"{rule.get('alert') or rule['record']}: {series.name}"


def alerts() -> set[str]:
    """Names of rules that return something only where something is wrong."""
    return {rule["alert"] for rule in rules() if "alert" in rule}
