"""One attempt to have a prompt computed: on which replica, how far it is, and whether another may follow it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from serve_app.core.errors import AdapterNotFound, AdapterUnusable, EngineFailed, ReplicaLost, ServeError
from serve_app.core.request import GenerationRequest
from serve_app.router.event import Event
from serve_app.router.link import ReplicaLink

MAX_PLACEMENTS = 3
"""Replicas that a prompt is given to before its loss is the client's."""
MAX_FAILURES = 1
"""Failures that a prompt survives: one that fails again is likely at fault itself."""
FAILURES = EngineFailed, AdapterNotFound, AdapterUnusable
"""What another replica may not fail with. A replica can lose files of an adapter that its card still has."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A prompt as it was given to a replica.

    request:   with an id that no other attempt has, so that nothing which comes late is taken for news
    part:      which of the run's requests it is of
    number:    from 1;  num_failures: in the attempts before, losses of replicas left out
    held:      events kept back until the prompt is complete
    has_shown: whether the reader has taken any of its events; then it cannot be made again
    """

    request: GenerationRequest
    link: ReplicaLink
    part: int
    number: int
    num_failures: int = 0
    num_unfinished: int = 0
    has_shown: bool = False
    held: list[Event] = field(default_factory=list)

    def may_be_repeated(self, error: ServeError) -> bool:
        """Whether the client need not be told of this error."""
        if self.has_shown or self.number >= MAX_PLACEMENTS or not isinstance(error, FAILURES):
            return False
        return isinstance(error, ReplicaLost) or self.num_failures < MAX_FAILURES


@dataclass(frozen=True, slots=True, kw_only=True)
class Homeless:
    """A prompt that is to be given to a replica, with what the attempts before came to."""

    request: GenerationRequest
    part: int
    number: int = 1
    num_failures: int = 0

    @classmethod
    def after(cls, attempt: Attempt, error: ServeError) -> Homeless:
        """What is left when an attempt was lost to this error."""
        return cls(
            request=attempt.request,
            part=attempt.part,
            number=attempt.number + 1,
            num_failures=attempt.num_failures + (not isinstance(error, ReplicaLost)),
        )

    def on(self, link: ReplicaLink, response_id: str) -> Attempt:
        """The next attempt. The first one is named by the part alone."""
        name = f"{response_id}/{self.part}"
        request_id = name if self.number == 1 else f"{name}/{self.number}"
        return Attempt(
            request=replace(self.request, request_id=request_id),
            link=link,
            part=self.part,
            number=self.number,
            num_failures=self.num_failures,
            num_unfinished=self.request.n,
        )
