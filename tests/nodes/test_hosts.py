"""Three hosts serve one file; one dies, one is cut off, one is exchanged, and the head dies and comes back."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.nodes.asking import CUT, NUM_STREAMS, RIGHT, TOLD, WRONG, Fared, answered_by, under
from tests.nodes.hosts import can_have_hosts
from tests.nodes.service import HEAD, REPOSITORY, SHELL, WAIT_S, WORKERS, Service, is_ready
from tests.tenants.postgres import folder_of_programs

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not can_have_hosts(), reason="hosts are namespaces: root, iproute2, util-linux and Redis"),
    pytest.mark.skipif(folder_of_programs() is None, reason="PostgreSQL is not installed"),
    pytest.mark.skipif(REPOSITORY.is_relative_to("/tmp"), reason="each host has a /tmp of its own"),
]

FIRST, SECOND = WORKERS
AWAY_S = 70
"""Longer than Ray's nodes wait for their head by default."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    folder = Path(tempfile.mkdtemp(prefix="hosts-"))
    service = Service(folder)
    try:
        service.start()
        service.until(service.is_full, "full")
        yield service
    finally:
        service.end()
        shutil.rmtree(folder, ignore_errors=True)


def tell(case: str, fared: Fared) -> None:
    streams = Counter(fared.streams.values())
    print(f"\n{case}: full after {fared.full_s:.1f} s, plain {dict(fared.plain)}, streams {dict(streams)}, "
          f"slowest plain {fared.slowest_s:.1f} s", flush=True)  # fmt: skip


def test_every_host_serves_the_same_and_what_is_published_at_one_is_served_at_all(service: Service) -> None:
    shown = {"SERVE_APP_KEY": service.key}
    folder = str(REPOSITORY / "adapters" / "demo" / "shout")
    words = ("serve_app", "adapters", "publish", "demo:loud", folder)
    service.shell(service.network.hosts[SECOND], *words, environment=shown)
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    headers = {"authorization": f"Bearer {service.key}"}
    for model in ("demo", "demo:pirate", "demo:loud"):
        asked = [
            httpx.post(f"{url}/v1/completions", json=body | {"model": model}, headers=headers, timeout=60)
            for url in service.urls()
            for _ in range(4)  # whichever router and replica answers
        ]
        assert {each.status_code for each in asked} == {200}, [each.text for each in asked]
        told = {(each.json()["choices"][0]["text"], each.headers["x-served-model"]) for each in asked}
        assert len(told) == 1, told
    assert {httpx.get(f"{url}/v1/models", timeout=60).status_code for url in service.urls()} == {401}


def test_the_doctor_finds_nothing_that_differs_and_then_what_does(service: Service) -> None:
    told = service.command("doctor", "--cluster")
    assert {each["name"] for each in told["nodes"]} == {HEAD, *WORKERS}
    assert [each["found"] for each in told["findings"]] == []


async def test_a_host_that_dies_costs_the_streams_of_its_router_and_no_others(service: Service) -> None:
    def dies_and_comes_back() -> None:
        service.network.hosts[SECOND].kill()
        service.begin(SECOND)

    fared = await under(service, (HEAD, FIRST), dies_and_comes_back, series="dies", is_over=lambda: True)
    tell("killed", fared)
    check(service, fared)


async def test_a_cable_that_is_pulled_and_plugged_in_again_costs_nothing(service: Service) -> None:
    def is_cut_off() -> None:
        host = service.network.hosts[SECOND]
        host.set_link(is_up=False)
        time.sleep(6)  # longer than two greetings, and not long enough for Ray to give the host up
        host.set_link(is_up=True)

    fared = await under(service, (HEAD, FIRST), is_cut_off, series="cut-off", is_over=lambda: True)
    tell("link down for 6 s", fared)
    check(service, fared)


async def test_a_host_is_exchanged_and_no_stream_is_cut(service: Service) -> None:
    third = service.begin("worker-3")
    leaving = service.network.hosts[SECOND]

    def leaves() -> None:
        service.drain(SECOND)

    def has_moved() -> bool:
        return service.replicas(leaving) == 0 and service.replicas(third) == 2

    fared = await under(service, (HEAD, FIRST), leaves, series="leaves", is_over=has_moved)
    leaving.kill()
    del service.network.hosts[SECOND]
    tell("drained", fared)
    assert set(fared.streams.values()) == {RIGHT}
    assert set(fared.plain) == {RIGHT}


async def test_a_head_that_dies_and_comes_back_is_not_noticed_by_streams(service: Service) -> None:
    def dies_and_comes_back() -> None:
        service.head.kill()
        time.sleep(AWAY_S)
        service.begin(HEAD)

    doors = tuple(name for name in service.network.hosts if name != HEAD)
    fared = await under(service, doors, dies_and_comes_back, series="head", is_over=lambda: True)
    tell("head killed", fared)
    assert set(fared.streams.values()) == {RIGHT}
    assert set(fared.plain) <= {RIGHT, TOLD}


def test_up_serves_in_a_cluster_that_runs_and_leaves_it_running(service: Service) -> None:
    """The last test of this cluster."""
    service.shell(service.head, "serve", "shutdown", "--yes")
    said = service.head.home / "said.txt"
    up = ("serve_app", "up", "cluster.yaml", "--address", "auto")
    process = service.stay(service.head, *up, said=said)
    service.until(lambda: process.poll() is not None or "Ready on" in said.read_text(), "ready")
    assert process.poll() is None, said.read_text()
    assert all(map(is_ready, service.urls()))
    again = subprocess.run(
        service.head.command(*SHELL, *up, "--port", "8001"),
        env=service.head.environment,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 1
    assert "The cluster serves demo, router already" in again.stderr, again.stderr
    (ours,) = psutil.Process(process.pid).children()  # of nsenter
    ours.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0, said.read_text()
    assert "RUNNING" not in service.shell(service.head, "serve", "status")
    assert service.command("doctor", "--cluster")["nodes"]


def check(service: Service, fared: Fared) -> None:
    """Nothing is wrong, and whatever broke off had its router on the host that is gone."""
    assert not fared.plain[WRONG]
    assert fared.plain[RIGHT]
    assert len(fared.streams) == NUM_STREAMS
    broken = {name for name, outcome in fared.streams.items() if outcome != RIGHT}
    assert set(fared.streams.values()) <= {RIGHT, CUT}
    assert not broken & answered_by(service.network.hosts[FIRST])
