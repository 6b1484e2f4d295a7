"""What went wrong, in the service's own words: the parameter, what it must be, what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import openai

REFUSAL = re.compile(r'^(?:Model "[^"]*": )?"(?P<param>[^"]+)" must (?P<must>.+?); found (?P<found>.+?)\.(?: |$)', re.S)
"""The one form in which the service refuses a parameter."""


class ServiceError(Exception):
    """The service refused or failed.

    message: a whole sentence
    status:  of HTTP; None where it came within a stream or nothing answered
    code:    the word for programs (`invalid_value`, `model_not_found`, …)
    param:   the parameter at fault, as it was sent
    facts:   what else the service told (`retry_after_s`, `n_prompt_tokens`, …)
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.facts = dict(facts or {})

    @property
    def allowed(self) -> str | None:
        """What the parameter must be or do; None where the error is not about a parameter's value."""
        return self._refused("must")

    @property
    def found(self) -> str | None:
        """What was sent in its place."""
        return self._refused("found")

    def __str__(self) -> str:
        lines = [self.message]
        lines += [f"  parameter  {self.param}"] if self.param else []
        lines += [f"  must       {self.allowed}"] if self.allowed else []
        lines += [f"  found      {self.found}"] if self.found else []
        lines += [f"  {name:<10} {value}" for name, value in self.facts.items()]
        named = " ".join(str(each) for each in (self.status, self.code) if each is not None)
        return "\n".join([*lines, f"  error      {named}"] if named else lines)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the frames between a cell and the wire."""
        return str(self).splitlines()

    def _refused(self, part: str) -> str | None:
        matched = REFUSAL.match(self.message)
        return matched[part] if matched else None


def translated(error: openai.OpenAIError, url: str) -> ServiceError:
    """The same as the service told it; where nothing answered at `url`, how to have something answer."""
    if isinstance(error, openai.APITimeoutError):
        return ServiceError(f"{url} took longer than this client waits.")
    if isinstance(error, openai.APIConnectionError) or is_of_a_proxy(error):
        remedy = "Start one (`serve_app up`), or name another (`SERVE_APP_URL`, `Client(url)`)."
        return ServiceError(f"No service can be reached at {url}. {remedy}")
    if isinstance(error, openai.APIStatusError):
        return of_envelope(_body_of(error), status=error.status_code, otherwise=error.message)
    return of_envelope(getattr(error, "body", None), status=None, otherwise=str(error))


def is_of_a_proxy(error: openai.OpenAIError) -> bool:
    """Return whether a proxy answered that knows no service: the service's own words for 404 are JSON."""
    return isinstance(error, openai.NotFoundError) and not isinstance(_body_of(error), dict)


def of_envelope(body: object, *, status: int | None, otherwise: str) -> ServiceError:
    """Read an error of any dialect: wrapped in `error` or flat."""
    inner = body.get("error", body) if isinstance(body, dict) else None
    if not isinstance(inner, dict) or "message" not in inner:
        return ServiceError(otherwise, status=status)
    known = ("message", "type", "param", "code", "error_code", "object")
    code = inner.get("error_code", inner.get("code"))
    return ServiceError(
        str(inner["message"]),
        status=status if status is not None or not isinstance(inner.get("code"), int) else inner["code"],
        code=code if isinstance(code, str) else None,
        param=inner.get("param"),
        facts={name: value for name, value in inner.items() if name not in known},
    )


def _body_of(error: openai.APIStatusError) -> object:
    """The whole body, which the client may have unwrapped."""
    try:
        return json.loads(error.response.text)
    except ValueError:
        return error.body
