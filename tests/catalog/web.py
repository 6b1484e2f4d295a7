"""A web server of adapters on this machine, which can be made to fail."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(slots=True)
class Web:
    """What it answers by path: a status and a body, or where it redirects to."""

    url: str = ""
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    num_asked: int = 0
    hides_sizes: bool = False
    may_answer: threading.Event = field(default_factory=threading.Event)

    def put(self, name: str, weights: bytes, config: bytes = b'{"peft_type": "LORA"}') -> str:
        """Offer an adapter, and return its address."""
        self.answers[f"/{name}/{CONFIG}"] = (200, config)
        self.answers[f"/{name}/{WEIGHTS}"] = (200, weights)
        return f"{self.url}/{name}"

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Take requests and answer none."""
        self.may_answer.clear()
        try:
            yield
        finally:
            self.may_answer.set()


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Serve on a free port, over TLS if there is a context."""
    web = Web()
    web.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(sends_body=False)

        def do_GET(self) -> None:
            self.answer(sends_body=True)

        def answer(self, *, sends_body: bool) -> None:
            web.num_asked += 1
            web.may_answer.wait()
            status, body = web.answers.get(self.path, (404, b""))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", body.decode())
                body = b""
            if web.hides_sizes:
                self.send_header("Connection", "close")
            else:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if sends_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        web.url = f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield web
        server.shutdown()
