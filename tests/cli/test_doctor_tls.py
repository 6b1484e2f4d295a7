"""The doctor gives its key to nobody whose certificate does not verify, and says that it does not."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from serve_app.cli import main
from serve_app.cli.doctor.doors import check_tls
from serve_app.cli.doctor.facts import Facts
from serve_app.cli.doctor.probes import answers_of, ask, doubt_of
from serve_app.cli.screen import Exit


class Listening(BaseHTTPRequestHandler):
    """Answers everything, and notes the keys that it is given."""

    keys: list[str]

    def do_GET(self) -> None:
        self.keys.extend(self.headers.get_all("authorization", []))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *said: Any) -> None:
        pass


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Its own authority, for 127.0.0.1, with its private part in the same file."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "here")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=private.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    file = tmp_path / "here.pem"
    file.write_bytes(
        private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain) + signed.public_bytes(encoding)
    )
    return file


@pytest.fixture
def listening(certificate: Path) -> Iterator[tuple[str, list[str]]]:
    """The address, and the keys that came there."""
    keys: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Listening,), {"keys": keys}))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", keys
    server.shutdown()
    server.server_close()


def test_no_key_goes_where_the_certificate_does_not_verify(listening: tuple[str, list[str]]) -> None:
    url, keys = listening
    answers = answers_of(url, "sa-secret")
    assert answers["health"].status == 200, "what needs no key is asked all the same"
    assert "page" not in answers
    assert keys == []
    doubt = doubt_of(url)
    assert doubt is not None
    (verdict,) = check_tls(Facts(url=url, doubt=doubt))
    assert "self-signed" in verdict.found


def test_a_key_goes_where_it_does(
    listening: tuple[str, list[str]], certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, keys = listening
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert answers_of(url, "sa-good")["page"].status == 200
    assert keys == ["Bearer sa-good"]
    assert doubt_of(url) is None
    assert list(check_tls(Facts(url=url))) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "https://127.0.0.1:abc", "http://[::1"])
def test_nobody_answers_where_nobody_can(url: str) -> None:
    assert ask(url, "GET", "/health", {}) is None
    assert doubt_of(url) is None


def test_an_address_without_a_scheme_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "127.0.0.1:18777"]) == Exit.MISUSED
    assert "'127.0.0.1:18777' is no address of a service: it begins with http://" in capsys.readouterr().err
