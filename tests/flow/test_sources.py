"""Adapters are published from an S3 server and over TLS, on this machine, through to the right tokens."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from transformers import AutoModelForCausalLM

from serve_app.catalog.cache import PLACE
from serve_app.http.app import build_app
from serve_app.router.fleet import Fleet
from serve_app.router.publishing import Publishing
from serve_app.router.router import Router
from tests.catalog.web import CONFIG, WEIGHTS, serving
from tests.engine.adapter_files import save_adapter
from tests.engine.conftest import DEMO
from tests.flow.stack import running_stack

pytestmark = pytest.mark.slow

LOAD = "/v1/load_lora_adapter"
PROMPT = {"prompt": "Once upon a time there was", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sources")
    model = AutoModelForCausalLM.from_pretrained(DEMO, local_files_only=True, dtype="float32")
    save_adapter(out / "sql", model, rank=16, seed=2)
    return out


@pytest.fixture(scope="module")
def s3(folders: Path) -> Iterator[str]:
    """The address of a real S3 server on loopback, with the adapter in `models/team/sql`."""
    if find_spec("moto") is None or find_spec("s3fs") is None:
        pytest.skip("needs moto and s3fs")
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stderr is not None
            lines = iter(server.stderr.readline, "")
            url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            put(url, folders / "sql")
            yield url
        finally:
            server.kill()


def put(s3: str, folder: Path) -> None:
    with httpx.Client(base_url=s3, timeout=60) as store:
        assert store.put("/models").status_code == 200
        for name in (CONFIG, WEIGHTS):
            content = (folder / name).read_bytes()
            assert store.put(f"/models/team/sql/{name}", content=content).status_code == 200


async def published(fleet: Fleet, root: str, url: str, name: str = "demo:sql") -> tuple[httpx.Response, str]:
    """Publish over HTTP, and return the answer and what the adapter then says."""
    app = build_app(Router(fleet), publishing=Publishing(fleet, roots=[root]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://open", timeout=120) as client:
        answer = await client.post(LOAD, json={"lora_name": name, "lora_path": url})
        if answer.status_code != 200:
            return answer, ""
        text = (await client.post("/v1/completions", json={"model": name, **PROMPT})).json()["choices"][0]["text"]
        [listed] = [each for each in (await client.get("/admin/adapters")).json()["data"] if each["id"] == name]
        assert (listed["path"], listed["replicas"]) == (url, listed["ready_replicas"])
        return answer, text


async def expected(folders: Path) -> str:
    """What the adapter says where its folder was there at start."""
    async with running_stack(num_replicas=1, adapters=str(folders)) as stack:
        return str((await stack.complete(model="demo:sql", **PROMPT))["choices"][0]["text"])


async def test_an_adapter_in_a_bucket_is_served_with_the_credentials_of_the_machine(
    s3: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    async with running_stack(num_replicas=2, adapters=None) as stack:
        root, url = "s3://models/team", "s3://models/team/sql"
        refused, _ = await published(stack.fleet, root, url)
        assert (refused.status_code, "credentials" in refused.text) == (400, True), refused.text
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-machine")
        missing, _ = await published(stack.fleet, root, "s3://models/team/none")
        assert (missing.status_code, "(404)" in missing.text) == (400, True), missing.text
        elsewhere, _ = await published(stack.fleet, root, "s3://models/other/sql")
        assert elsewhere.status_code == 403
        signed, _ = await published(stack.fleet, root, f"{url}?X-Amz-Signature=deadbeef")
        assert (signed.status_code, "deadbeef" in signed.text) == (400, False)
        loaded, text = await published(stack.fleet, root, url)
        assert loaded.status_code == 200, loaded.text
        assert text == await expected(folders)


async def test_an_adapter_over_tls_is_served_where_the_certificate_is_trusted(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certificate_at(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    monkeypatch.setenv(PLACE, str(tmp_path / "cache"))
    with serving(context) as web:
        url = web.put("sql", (folders / "sql" / WEIGHTS).read_bytes(), (folders / "sql" / CONFIG).read_bytes())
        async with running_stack(num_replicas=1, adapters=None) as stack:
            doubted, _ = await published(stack.fleet, web.url, url)
            assert (doubted.status_code, "Certificate" in doubted.text or "SSL" in doubted.text) == (503, True)
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            loaded, text = await published(stack.fleet, web.url, url)
            assert loaded.status_code == 200, loaded.text
            assert text == await expected(folders)


def certificate_at(folder: Path) -> Path:
    """Make a certificate of this machine's own, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(names, critical=False).add_extension(x509.BasicConstraints(True, None), critical=True)
    path = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path
