"""What a completion went through and when: admit, queue, prefill and decode of each prompt, stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.router.run import Run
from serve_app.router.story import Story
from serve_app.router.tally import PromptTally

MAX_PROMPTS = 16
"""So many of a request's prompts have legs of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A stretch of a request's time.

    begun_at, ended_at: by the monotonic clock, seconds
    part:    which prompt for which model it is of; None is the request as a whole
    replica: that computed it, where one did
    num_attempts: replicas that the prompt was given to, the last one included
    num_tokens:   computed in it: of the prompt, or generated
    """

    name: str
    begun_at: float
    ended_at: float
    part: int | None = None
    replica: str = ""
    num_attempts: int = 1
    num_tokens: int | None = None


def legs_of(story: Story, ended_at: float) -> Iterator[Leg]:
    """The legs of a request that is over, as far as it came; each ends when it was over or the request was.

    `admit`: from the first byte to the submission: reading, checking, admission, limits and placement.
    `queue`, `prefill`, `decode`: of each prompt. The queue is what its replica told; the way there and cutting text
    into tokens count as prefill, which ends with the first delta.
    `stream`: from the first bytes that were sent to the end.
    """
    run = story.run
    yield Leg(name="admit", begun_at=story.started_at, ended_at=ended_at if run is None else run.tally.entered_at)
    if run is not None:
        yield from _of_prompts(run, ended_at)
    if story.first_sent_at is not None:
        yield Leg(name="stream", begun_at=story.first_sent_at, ended_at=ended_at)


def _of_prompts(run: Run, ended_at: float) -> Iterator[Leg]:
    for number, (part, prompt, replicas) in enumerate(run.tally.parts):
        if number == MAX_PROMPTS:
            return
        yield from _of_prompt(part, prompt, tuple(replicas), entered_at=run.tally.entered_at, ended_at=ended_at)


def _of_prompt(
    part: int, prompt: PromptTally, replicas: tuple[str, ...], *, entered_at: float, ended_at: float
) -> Iterator[Leg]:
    first_at = ended_at if prompt.first_at is None else prompt.first_at
    report = prompt.report
    stepped_at = first_at if report is None else min(entered_at + report.queue_s, first_at)

    def leg(name: str, begun_at: float, until: float, num_tokens: int | None) -> Leg:
        replica = replicas[-1] if replicas else ""
        return Leg(
            name=name,
            begun_at=begun_at,
            ended_at=until,
            part=part,
            replica=replica,
            num_attempts=len(replicas),
            num_tokens=num_tokens,
        )

    yield leg("queue", entered_at, stepped_at, None)
    if report is not None:
        yield leg("prefill", stepped_at, first_at, report.num_tokens - report.num_cached_tokens)
    if prompt.first_at is not None and prompt.last_at is not None and prompt.num_completion_tokens:
        yield leg("decode", prompt.first_at, prompt.last_at, prompt.num_completion_tokens)
