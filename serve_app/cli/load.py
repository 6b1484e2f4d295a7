"""Load on a service: so many clients that each ask anew when they were answered, and when what of it came."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from serve_app.cli.client import Service, ServiceFailed
from serve_app.cli.exits import Exit

PATH = "/v1/completions"
WORDS = (
    "the old owl looks at a small boat on its way over quiet water while morning light falls through tall trees",
    "and somebody far away sings of rain bread stars a red door two brave mice and winter",
)


ROUNDING = 1e-9
"""By which a product of floats may be too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """num_clients: at once;  num_requests: in all;  num_words: of each prompt;  parameters: of each request besides"""

    num_clients: int
    num_requests: int
    max_tokens: int
    num_words: int
    parameters: Mapping[str, object] = field(default_factory=dict)

    def bodies(self, model: str) -> Iterator[dict[str, object]]:
        """Requests of which no two prompts begin alike, the same every time; each runs to its full length."""
        random, words = Random(self.num_requests), " ".join(WORDS).split()  # nosec B311 # prompts
        for number in range(self.num_requests):
            prompt = " ".join([f"{number}:", *random.choices(words, k=self.num_words)])  # nosec B311
            asked = {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, "seed": number}
            usual = {"ignore_eos": True, **self.parameters}
            yield {**asked, **usual, "stream_options": {"include_usage": True}}


@dataclass(slots=True, kw_only=True)
class Answer:
    """What became of one request. Times are seconds on one clock. seen_at: when each event with text came

    error: None where there was none; otherwise a command would end with `code`
    """

    sent_at: float
    ended_at: float = 0.0
    seen_at: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    code: Exit = Exit.SERVICE_FAILED

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event with text and the next."""
        return [after - before for before, after in zip(self.seen_at, self.seen_at[1:], strict=False)]


def drive(
    service: Service, bodies: Iterator[dict[str, object]], *, num_clients: int, told: Callable[[Answer], object]
) -> list[Answer]:
    """All requests by so many threads; an answer of each, errors among them. `told` hears of each in its thread."""
    answers: list[Answer] = []
    lock = threading.Lock()

    def taken() -> dict[str, object] | None:
        with lock:
            return next(bodies, None)

    def work() -> None:
        while (body := taken()) is not None:
            answer = ask(service, body)
            with lock:
                answers.append(answer)
            told(answer)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(num_clients)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return answers


def ask(service: Service, body: Mapping[str, object]) -> Answer:
    """One request; never raises for what the service does."""
    answer = Answer(sent_at=time.perf_counter())
    try:
        for event in service.events(PATH, body):
            if any(choice["text"] for choice in event["choices"]):
                answer.seen_at.append(time.perf_counter())
            if usage := event.get("usage"):
                answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    except ServiceFailed as failure:
        answer.error, answer.code = str(failure), failure.code
    answer.ended_at = time.perf_counter()
    return answer


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that so many of all are not above (nearest rank); None of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - ROUNDING) - 1)] if ordered else None
