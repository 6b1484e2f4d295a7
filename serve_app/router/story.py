"""What became of one request, for its line in the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from serve_app.api.completion import CompletionRequest
from serve_app.core.errors import ServeError
from serve_app.router.run import Run


@dataclass(slots=True)
class Story:
    """Filled while the request is served. Nothing of prompts or completions gets in.

    started_at, first_sent_at: by the monotonic clock, seconds
    """

    request_id: str
    started_at: float = field(default_factory=time.monotonic)
    first_sent_at: float | None = None
    request: CompletionRequest | None = None
    run: Run | None = None
    error: ServeError | None = None

    def facts(self, status: int) -> dict[str, object]:
        """One flat object of what is known."""
        facts: dict[str, object] = {
            "event": "completion",
            "request_id": self.request_id,
            "status": status,
            "duration_s": round(time.monotonic() - self.started_at, 6),
        }
        if self.first_sent_at is not None:
            facts["first_sent_s"] = round(self.first_sent_at - self.started_at, 6)
        if self.request is not None:
            facts |= _facts_of_request(self.request)
        if self.run is not None:
            facts |= _facts_of_run(self.run)
        if self.error is not None:
            facts |= {"error_code": self.error.code, "param": self.error.param}
        return facts


def _facts_of_request(request: CompletionRequest) -> dict[str, object]:
    return {
        "model": request.model,
        "stream": request.stream,
        "num_prompts": len(request.prompts),
        "num_choices": request.num_choices,
    }


def _facts_of_run(run: Run) -> dict[str, object]:
    return {
        "response_id": run.response_id,
        "prompt_tokens": run.tally.usage.prompt_tokens,
        "cached_tokens": run.tally.usage.cached_tokens,
        "completion_tokens": run.tally.usage.completion_tokens,
        "finish_reasons": {reason.value: count for reason, count in run.tally.finish_reasons.items()},
    }
