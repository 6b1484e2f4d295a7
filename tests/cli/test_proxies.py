"""A proxy of the environment is for other machines: what runs on this one is asked directly."""

from __future__ import annotations

import pytest

from serve_app.cli.address import Address
from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.screen import Exit
from serve_app.cli.up import is_healthy
from serve_app.lab.local import is_ready
from tests.cli.served import CommandLine, Served

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there: whoever asks through it has no answer."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_of_this_machine_is_asked_past_the_proxy(run: CommandLine, served: Served, host: str) -> None:
    url = served.url.replace("127.0.0.1", host)
    assert run("models", "--url", url).code == Exit.DONE
    assert is_ready(url)
    assert is_healthy(Address(host=host, port=int(url.rpartition(":")[2])))


def test_a_service_elsewhere_is_asked_through_the_proxy() -> None:
    with pytest.raises(ServiceFailed, match=r"(?i)refused") as failure:
        Service(url="http://service.invalid", timeout_s=5).models()  # its name is the proxy's to find
    assert failure.value.code == Exit.UNREACHABLE
