"""The doctor says where a certificate is not trusted."""

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
from serve_app.cli.doctor.gathering import Facts, ask, doubt_of
from serve_app.cli.doctor.report import check_tls
from serve_app.cli.screen import Exit


class Listening(BaseHTTPRequestHandler):
    """Answers everything."""

    def do_GET(self) -> None:
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
def url(certificate: Path) -> Iterator[str]:
    """The address of a service with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Listening)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_certificate_that_nobody_signed_is_doubted_and_the_service_asked_all_the_same(url: str) -> None:
    answer = ask(url, "GET", "/health")
    assert answer is not None
    assert answer.status == 200
    doubt = doubt_of(url)
    assert doubt is not None
    (verdict,) = check_tls(Facts(url=url, doubt=doubt))
    assert "self-signed" in verdict.found


def test_one_whose_authority_is_trusted_is_not(url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert doubt_of(url) is None
    assert list(check_tls(Facts(url=url))) == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "https://127.0.0.1:abc", "http://[::1"])
def test_nobody_answers_where_nobody_can(url: str) -> None:
    assert ask(url, "GET", "/health") is None
    assert doubt_of(url) is None


def test_an_address_without_a_scheme_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "127.0.0.1:18777"]) == Exit.MISUSED
    assert "'127.0.0.1:18777' is no address of a service: it begins with http://" in capsys.readouterr().err
