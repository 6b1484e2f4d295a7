"""Talks to a running service, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from serve_app.api.paths import ADMIN_PREFIX
from serve_app.cli.screen import KEY_VARIABLE, URL_VARIABLE, CommandFailed, Exit
from serve_app.core.batches import OK, REST_S, Answered
from serve_app.core.errors import Unavailable
from serve_app.core.machine import is_loopback

TIMEOUT_S = 600.0
DIALECT_HEADER = "X-Completions-Dialect"
CAPSULE_HEADER = "X-Capsule"
END = "[DONE]"
START_ONE = f"Start one with `serve_app up`, or name another with --url or {URL_VARIABLE}."
GIVE_A_KEY = f"Give one with {KEY_VARIABLE} or --key; `serve_app keys create` makes one."
LIST_MODELS = "`serve_app models` lists what is served."
BE_OLDER = "The service may be of another version than this command line."
SCHEMES = ("http://", "https://")
RETRIED = frozenset({429, 503})
NO_REASON = "It gave no reason: a proxy in front of it may have said so, or another program that listens there."
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
"""Before each attempt to fetch the rest of a stream that broke off."""
MAY_COME_BACK = frozenset({None, 502, 503, 504})
"""Statuses of a service that may have the rest a moment later; None where none came."""
NOT_FOUND = 404
RETRY_AFTER, LOCATION = "Retry-After", "Location"
NO_HEADERS: Mapping[str, str | None] = {}


class ServiceFailed(CommandFailed):
    """The service could not be reached, or answered with an error.

    status: of HTTP; None where none came;  error: the error's own members, `code` and `param` among them
    retry_s: seconds of its Retry-After
    """

    retry_s = REST_S

    def __init__(
        self, message: str, code: Exit, *, status: int | None = None, error: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code)
        self.status = status
        self.error = dict(error or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One service, as one key and dialect see it.

    key, dialect, request_id: None is none
    wants_capsule: of each completion
    """

    url: str
    key: str | None = None
    dialect: str | None = None
    request_id: str | None = None
    timeout_s: float = TIMEOUT_S
    wants_capsule: bool = False

    def json(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        member: str | None,
        method: str | None = None,
    ) -> Any:
        """Return the service's answer; a body is posted. Raises ServiceFailed.

        member: that the answer has, whatever else is in it; None where it is a list
        method: None is POST with a body, and GET without one
        """
        try:
            answer = json.loads(self._whole(path, body, method))
        except ValueError as error:
            raise _stranger(self.url) from error
        if not (isinstance(answer, list) if member is None else isinstance(answer, dict) and member in answer):
            raise _stranger(self.url)
        return answer

    def answered(self, path: str, body: Mapping[str, object]) -> Answered:
        """Return what the service answers, refusals included. Raises Unavailable where no answer comes."""
        try:
            return Answered(status=OK, body=self._whole(path, body))
        except ServiceFailed as failure:
            if failure.status is None or (failure.status == NOT_FOUND and not failure.error):  # of a proxy alone
                raise Unavailable(str(failure)) from failure
            told = {"error": {"message": str(failure), **failure.error}}
            return Answered(status=failure.status, body=json.dumps(told).encode(), retry_s=failure.retry_s)

    def text(self, path: str, body: Mapping[str, object] | None = None, *, word: str) -> str:
        """Return an answer that is no JSON and has this word in it; a body is posted. Raises ServiceFailed."""
        content = self._whole(path, body).decode("utf-8", "replace")
        if word not in content:
            raise _stranger(self.url)
        return content

    def events(self, path: str, body: Mapping[str, object]) -> Generator[dict[str, Any]]:
        """Yield the events of a stream; closing the iteration frees the service. Raises ServiceFailed.

        Where the stream breaks off, the rest of it is fetched.
        """
        place = _Place()
        for pause_s in (*PAUSES_S, None):
            try:
                yield from self._events(path, body, place)
                return
            except ServiceFailed as failure:
                if pause_s is None or not place.response_id or failure.status not in MAY_COME_BACK:
                    raise
            time.sleep(pause_s)

    def _events(self, path: str, body: Mapping[str, object], place: _Place) -> Generator[dict[str, Any]]:
        """Yield the events behind a place, which moves along."""
        if place.response_id:
            named = urllib.parse.quote(place.response_id, safe="")
            opened = self._open(f"{path}/{named}", last_id=place.last_id)
        else:
            opened = self._open(path, {**body, "stream": True})
        with closing(opened) as response, _unbroken(self.url):
            last_id = ""
            for line in response:
                if line.startswith(b"id:"):
                    last_id = line[3:].decode().strip()
                if not line.startswith(b"data:") or not line.endswith(b"\n"):
                    continue
                if (data := line[5:].decode().strip()) == END:
                    return
                event = _event(json.loads(data), self.url)
                place.response_id, place.last_id = str(event.get("id") or "") if last_id else "", last_id
                yield event
        raise _broken(self.url)

    def models(self) -> list[dict[str, Any]]:
        """Return every name that can be sent as `model`. Raises ServiceFailed."""
        listed = self.json("/v1/models", member="data")["data"]
        if not isinstance(listed, list):
            raise _stranger(self.url)
        return listed

    def default_model(self, model: str | None) -> str:
        """Return the model that was named, or the first that completes texts. Raises ServiceFailed."""
        if model is not None:
            return model
        listed = self.models()
        if not listed:
            raise ServiceFailed(self._why_no_model(), Exit.SERVICE_FAILED)
        return str(
            next((each for each in listed if "completion" in each.get("capabilities", "completion")), listed[0])["id"]
        )

    def _why_no_model(self) -> str:
        try:
            self.json("/health", member="status")
        except ServiceFailed as failure:
            if loading := failure.error.get("models"):
                return f"No model is ready yet: {', '.join(map(str, loading))} is loading. Try again in a moment."
        return "No model is served to this key. `serve_app models` lists what is."

    def _whole(self, path: str, body: Mapping[str, object] | None, method: str | None = None) -> bytes:
        with closing(self._open(path, body, method)) as response, _unbroken(self.url):
            return response.read()

    def _open(
        self, path: str, body: Mapping[str, object] | None = None, method: str | None = None, *, last_id: str = ""
    ) -> http.client.HTTPResponse:
        check_url(self.url)
        check_key(self.key)
        data = None if body is None else json.dumps(body).encode()
        try:
            address = self.url.rstrip("/") + path
            headers = self._headers() | ({"last-event-id": last_id} if last_id else {})
            request = urllib.request.Request(address, data, headers, method=method)
            opened = self._answered(request, may_repeat=not path.startswith(ADMIN_PREFIX))
        except urllib.error.HTTPError as error:
            with error, _unbroken(self.url):
                told = {name: error.headers.get(name) for name in (RETRY_AFTER, LOCATION)}
                content = error.read()
            failure = _failed(error.code, content, told)
            failure.retry_s = float(after) if (after := told[RETRY_AFTER] or "").isdecimal() else REST_S
            raise failure from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            message = f"No service answers at {self.url}: {reason}. {START_ONE}"
            raise ServiceFailed(message, Exit.UNREACHABLE) from error
        except http.client.HTTPException as error:  # it speaks something else
            raise _stranger(self.url) from error
        response: http.client.HTTPResponse = opened
        return response

    def _answered(self, request: urllib.request.Request, *, may_repeat: bool) -> Any:
        """Send a request, and once more where whoever had it was lost before it had begun to answer.

        may_repeat: nothing but an answer comes of it: a key would be made twice
        """
        try:
            return opener_of(self.url).open(request, timeout=self.timeout_s)
        except ConnectionError:  # nobody who listens is another error
            if not may_repeat:
                raise
            return opener_of(self.url).open(request, timeout=self.timeout_s)

    def _headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream, text/plain"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        if self.request_id:
            headers["x-request-id"] = self.request_id
        if self.wants_capsule:
            headers[CAPSULE_HEADER] = "true"
        return headers if self.dialect is None else {**headers, DIALECT_HEADER: self.dialect}


@dataclass(slots=True)
class _Place:
    """How far a stream was read: its id, where it can be fetched anew, and that of its last event."""

    response_id: str = ""
    last_id: str = ""


class Staying(urllib.request.HTTPRedirectHandler):
    """Follows nobody elsewhere: the key would go along, to any host and in the clear."""

    def redirect_request(self, *sent: Any) -> None:
        return None


def check_url(url: str) -> None:
    """Raises ServiceFailed for what no service can be asked at."""
    if not url.startswith(SCHEMES):
        raise ServiceFailed(f"{url!r} is no address of a service: it begins with http:// or https://.", Exit.MISUSED)
    try:
        urllib.parse.urlsplit(url).port  # noqa: B018 - which is where it is looked at
    except ValueError as error:
        raise ServiceFailed(f"{url!r} is no address of a service: {error}.", Exit.MISUSED) from error


def check_key(key: str | None) -> None:
    """Raises ServiceFailed for what no header can hold; the key is not repeated."""
    if key is not None and not (key.isascii() and key.isprintable()):
        message = f"The key has characters that no key has, such as a line's end. {GIVE_A_KEY}"
        raise ServiceFailed(message, Exit.MISUSED)


def opener_of(url: str) -> urllib.request.OpenerDirector:
    """Return what opens the URL. A proxy of the environment is for other machines, never for this one."""
    is_here = is_loopback(urllib.parse.urlsplit(url).hostname or "")
    return urllib.request.build_opener(Staying, *([urllib.request.ProxyHandler({})] if is_here else []))


def query(path: str, **members: str | None) -> str:
    """Return the path with a query of the members that are given."""
    said = {name: value for name, value in members.items() if value is not None}
    return f"{path}?{urllib.parse.urlencode(said)}" if said else path


@contextmanager
def _unbroken(url: str) -> Iterator[None]:
    """Read an answer; raises ServiceFailed where it breaks off, perhaps within a character or an event."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _broken(url) from error


def _event(event: Any, url: str) -> dict[str, Any]:
    """Return one event of a stream. Raises ServiceFailed for an error and for what is no event."""
    if not isinstance(event, dict):
        raise _broken(url)
    if "error" in event:
        raise _failed(500, json.dumps(event).encode())
    if "choices" not in event:
        raise _stranger(url)
    return event


def _failed(status: int, body: bytes, headers: Mapping[str, str | None] = NO_HEADERS) -> ServiceFailed:
    """Return the error in the service's own words, with the next step."""
    error, retry_after = _error_of(body), headers.get(RETRY_AFTER)
    if 300 <= status < 400:
        message = f"The service is elsewhere: {headers.get(LOCATION)}. Name that with --url or {URL_VARIABLE}."
        return ServiceFailed(message, Exit.REFUSED, status=status)
    message = str(error.get("message") or f"The service answered with status {status}. {NO_REASON}")
    if status in RETRIED and retry_after is not None and "retry" not in message:
        message = f"{message} Retry in {retry_after} s."
    code = Exit.SERVICE_FAILED if status >= 500 or status == 429 else Exit.REFUSED
    return ServiceFailed(f"{message} {_remedy(status, error)}".rstrip(), code, status=status, error=error)


def _remedy(status: int, error: Mapping[str, Any]) -> str:
    """Return the next step where the service does not say it itself."""
    if status in (401, 403):
        return GIVE_A_KEY
    if status == NOT_FOUND:
        return LIST_MODELS if error.get("param") else BE_OLDER
    return ""


def _error_of(body: bytes) -> dict[str, Any]:
    """Return the members of an error of any dialect: wrapped in `error`, or flat."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    inner = content.get("error", content) if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else {}


def _stranger(url: str) -> ServiceFailed:
    return ServiceFailed(f"What answers at {url} is no such service. {START_ONE}", Exit.UNREACHABLE)


def _broken(url: str) -> ServiceFailed:
    message = f"{url} broke off before its answer ended. `serve_app top` shows whether it is well."
    return ServiceFailed(message, Exit.SERVICE_FAILED)
