"""Talks to a running service, with nothing but the standard library."""

from __future__ import annotations

import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from serve_app.cli.exits import CommandFailed, Exit
from serve_app.cli.names import KEY_VARIABLE, URL_VARIABLE

TIMEOUT_S = 600.0
DIALECT_HEADER = "X-Completions-Dialect"
END = "[DONE]"
START_ONE = f"Start one with `serve_app up`, or name another with --url or {URL_VARIABLE}."
GIVE_A_KEY = f"Give one with {KEY_VARIABLE} or --key; `serve_app keys create` makes one."
LIST_MODELS = "`serve_app models` lists what is served."
BE_OLDER = "The service may be of another version than this command line."
SCHEMES = ("http://", "https://")
RETRIED = frozenset({429, 503})


class ServiceFailed(CommandFailed):
    """The service could not be reached, or answered with an error.

    status: of HTTP; None where none came;  error: the error's own members, `code` and `param` among them
    """

    def __init__(
        self, message: str, code: Exit, *, status: int | None = None, error: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code)
        self.status = status
        self.error = dict(error or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service, as one key and dialect see it.

    key, dialect: None is none
    """

    url: str
    key: str | None = None
    dialect: str | None = None
    timeout_s: float = TIMEOUT_S

    def json(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """What it answers; a body is posted. Raises ServiceFailed."""
        with closing(self._open(path, body)) as response:
            try:
                return json.load(response)
            except (ValueError, OSError, http.client.HTTPException) as error:
                raise _broken(self.url) from error

    def text(self, path: str) -> str:
        """What it answers that is no JSON. Raises ServiceFailed."""
        with closing(self._open(path, None)) as response:
            return str(response.read().decode("utf-8", "replace"))

    def events(self, path: str, body: Mapping[str, object]) -> Generator[dict[str, Any]]:
        """The events of a stream; closing the iteration frees the service. Raises ServiceFailed."""
        with closing(self._open(path, {**body, "stream": True})) as response:
            has_ended = False
            for data in _data(response, self.url):
                if data == END:
                    has_ended = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise _failed(500, json.dumps(event).encode())
                yield event
            if not has_ended:
                raise _broken(self.url)

    def models(self) -> list[dict[str, Any]]:
        """Every name that can be sent as `model`. Raises ServiceFailed."""
        return list(self.json("/v1/models")["data"])

    def default_model(self, model: str | None) -> str:
        """The model that was named, or the first that is served. Raises ServiceFailed."""
        if model is not None:
            return model
        listed = self.models()
        if not listed:
            message = "No model is served to this key. `serve_app models` lists what is."
            raise ServiceFailed(message, Exit.SERVICE_FAILED)
        return str(listed[0]["id"])

    def _open(self, path: str, body: Mapping[str, object] | None) -> http.client.HTTPResponse:
        check_url(self.url)
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, self._headers())
            opened = opener_of(self.url).open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _failed(error.code, error.read(), error.headers.get("Retry-After")) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            message = f"No service answers at {self.url}: {reason}. {START_ONE}"
            raise ServiceFailed(message, Exit.UNREACHABLE) from error
        response: http.client.HTTPResponse = opened
        return response

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream, text/plain"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        return headers if self.dialect is None else {**headers, DIALECT_HEADER: self.dialect}


def check_url(url: str) -> None:
    """Raises ServiceFailed for what no service can be asked at."""
    if not url.startswith(SCHEMES):
        raise ServiceFailed(f"{url!r} is no address of a service: it begins with http:// or https://.", Exit.MISUSED)


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """What opens it: a proxy of the environment is for other machines, and never for this one."""
    is_here = _is_loopback(urllib.parse.urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def _is_loopback(host: str) -> bool:
    """Whether the name is one of this machine alone; nothing is looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def query(path: str, **members: str | None) -> str:
    """The path with what was said of it."""
    said = {name: value for name, value in members.items() if value is not None}
    return f"{path}?{urllib.parse.urlencode(said)}" if said else path


def _data(response: http.client.HTTPResponse, url: str) -> Iterator[str]:
    """The data of each event, as it comes."""
    try:
        for line in response:
            if line.startswith(b"data:"):
                yield line[5:].decode().strip()
    except (OSError, http.client.HTTPException) as error:
        raise _broken(url) from error


def _failed(status: int, body: bytes, retry_after: str | None = None) -> ServiceFailed:
    """In the service's own words, and with the next step."""
    error = _error_of(body)
    message = str(error.get("message") or f"The service answered with status {status}.")
    if status in RETRIED and retry_after is not None and "retry" not in message:
        message = f"{message} Retry in {retry_after} s."
    code = Exit.SERVICE_FAILED if status >= 500 or status == 429 else Exit.REFUSED
    return ServiceFailed(f"{message} {_remedy(status, error)}".rstrip(), code, status=status, error=error)


def _remedy(status: int, error: Mapping[str, Any]) -> str:
    """The next step, where the service does not say it itself."""
    if status in (401, 403):
        return GIVE_A_KEY
    if status == 404:
        return LIST_MODELS if error.get("param") else BE_OLDER
    return ""


def _error_of(body: bytes) -> dict[str, Any]:
    """The members of an error of any dialect: wrapped in `error`, or flat."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    inner = content.get("error", content) if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else {}


def _broken(url: str) -> ServiceFailed:
    message = f"{url} broke off before its answer ended. `serve_app top` shows whether it is well."
    return ServiceFailed(message, Exit.SERVICE_FAILED)
