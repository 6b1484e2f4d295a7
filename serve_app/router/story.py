"""What became of one request, for its line in the log."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from serve_app.api.completion import CompletionRequest
from serve_app.api.dialects import HEADER
from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.parameters import PARAMETERS
from serve_app.api.responding import RESPONSES
from serve_app.core.errors import ServeError
from serve_app.core.tenants import LOCAL, Amount, Identity
from serve_app.router.accounting import ERROR, Accounting
from serve_app.router.admission import Ticket
from serve_app.router.quotas import Permit
from serve_app.router.run import Run
from serve_app.router.stats import Excerpts, is_sampled

NAME = re.compile(r"([A-Za-z_][\w-]*)(?:\[\d+\])*")
OF_HEADERS = ("content-type", "content-length", "x-request-timeout", "x-capsule", HEADER.lower())
KNOWN_NAMES = frozenset({*PARAMETERS, *RESPONSES.table, *OF_HEADERS})
UNKNOWN_NAME = "(unknown)"
MAX_USER_CHARS = 128


@dataclass(slots=True)
class Story:
    """Filled while the request is served. Nothing of prompts or completions gets in, nor a name that a client made up,
    but for the `user` that it names, and the excerpts that a tenant asked for, which have a line of their own.

    identity: who it is from
    models: what its model names were resolved to; empty as long as they are a client's words
    ticket: its place, where it was let in;  permit: what it holds of its tenant's limits
    opened: what it is to be, before replicas have taken it;  run: that, from then on
    started_at, first_sent_at: by the monotonic clock, seconds
    """

    request_id: str
    identity: Identity = LOCAL
    started_at: float = field(default_factory=time.monotonic)
    first_sent_at: float | None = None
    request: CompletionRequest | None = None
    models: tuple[str, ...] = ()
    ticket: Ticket | None = None
    opened: Run | None = None
    run: Run | None = None
    permit: Permit | None = None
    error: ServeError | None = None
    excerpts: Excerpts | None = None

    def excerpt(self, run: Run) -> None:
        """Have texts of this run kept where the tenant asked for that and the request is in its sample."""
        tenant = self.identity.tenant
        if is_sampled(self.request_id, tenant=tenant.name, share=tenant.log_texts):
            self.excerpts = run.stats.excerpts = Excerpts(run.requests)

    def texts(self) -> dict[str, object]:
        """Return the line of its excerpts, where it has any."""
        assert self.excerpts is not None, "its tenant asked for no texts"
        return {
            "time": _now(),
            "event": "texts",
            "request_id": self.request_id,
            "tenant": self.identity.tenant.name,
            "model": ",".join(self.models),
            **self.excerpts.facts(),
        }

    def facts(self, status: int) -> dict[str, object]:
        """One flat object of what is known. time: now, in UTC"""
        facts: dict[str, object] = {
            "time": _now(),
            "event": "embedding" if isinstance(self.request, EmbeddingRequest) else "completion",
            "request_id": self.request_id,
            "status": status,
            "duration_s": round(time.monotonic() - self.started_at, 6),
        }
        if self.identity is not LOCAL:
            facts |= {"tenant": self.identity.tenant.name, "key_id": self.identity.key_id}
        if self.first_sent_at is not None:
            facts["first_sent_s"] = round(self.first_sent_at - self.started_at, 6)
        if self.request is not None:
            facts |= _facts_of_request(self.request, self.models)
        if self.run is not None:
            facts |= _facts_of_run(self.run)
        if self.error is not None:
            facts |= {"error_code": self.error.code, "param": _known(self.error.param)}
        return facts

    def end(self, status: int, accounting: Accounting | None = None) -> None:
        """The request is over: its place is free, and with `accounting` it is written down, a stream that ended by
        an error as that.

        status: of the response
        """
        if self.ticket is not None:
            self.ticket.give_back(None if self.run is None else self.run.num_finished)
        given = self.run
        if given is None and self.opened is not None and self.opened.stats.given and not self.opened.is_refused:
            given = self.opened  # replicas may compute some of it
        if accounting is not None and given is not None:
            status = status if self.error is None or status >= ERROR else self.error.status
            accounting.close(self.identity, given, request_id=self.request_id, status=status, permit=self.permit)
        elif self.permit is not None:  # no replica took it
            self.permit.settle(Amount())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _known(param: str | None) -> str | None:
    """The parameter at fault without what the client may have put into its place: a name that nobody knows is only
    said to be one."""
    if param is None:
        return None
    place = NAME.match(param)
    return place.group() if place is not None and place[1].lower() in KNOWN_NAMES else UNKNOWN_NAME


def _facts_of_request(request: CompletionRequest, models: Sequence[str]) -> dict[str, object]:
    return {
        "model": ",".join(models) or UNKNOWN_NAME,
        "stream": request.stream,
        "num_prompts": len(request.prompts),
        "num_choices": request.num_choices,
        **({} if request.user is None else {"user": request.user[:MAX_USER_CHARS]}),
    }


def _facts_of_run(run: Run) -> dict[str, object]:
    usage = run.stats.usage
    return {
        "response_id": run.response_id,
        "served": ",".join(dict.fromkeys(each.model.pinned for each in run.requests)),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": {reason.value: count for reason, count in run.stats.finish_reasons.items()},
    }
