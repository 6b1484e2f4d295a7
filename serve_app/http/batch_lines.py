"""Answers a line of a batch as its route would answer a client."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Message

from serve_app.api.paths import Path
from serve_app.core.batches import REST_S, Answered
from serve_app.core.tenants import Identity
from serve_app.http.completions import Completions
from serve_app.http.exchange import having
from serve_app.http.settings import HttpSettings
from serve_app.http.styles import STYLES
from serve_app.router.batch_worker import Answer
from serve_app.router.router import Router


def line_answers(settings: HttpSettings) -> Answer:
    """Return what computes lines, within these settings."""

    async def answer(router: Router, identity: Identity, path: str, body: bytes, request_id: str) -> Answered:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        state = {"request_id": request_id, "identity": identity}
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "state": state}
        await Completions(router, settings.for_tenant(identity.tenant), STYLES[Path(path)])(scope, having(body), send)
        told = Headers(raw=sent[0]["headers"])
        text = b"".join(message.get("body", b"") for message in sent[1:])
        return Answered(status=sent[0]["status"], body=text, retry_s=float(told.get("retry-after", REST_S)))

    return answer
