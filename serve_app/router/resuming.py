"""Streams that their clients fetch anew: found where replicas keep them, whichever routers had them before."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serve_app.core.backend import Backend
from serve_app.core.errors import NotFound, Unavailable
from serve_app.core.progress import Past
from serve_app.core.request import Continued, GenerationRequest, Kept
from serve_app.router.fleet import Fleet
from serve_app.router.patience import patience

ANSWER_S = 4.0
"""For so long a client waits for replicas that may have its stream."""
AGAIN_S = 1.0
"""After how long a client asks again that came while a replica did not answer, or while another request fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stream as far as it was told. parts: its prompts by their numbers, without those that were lost"""

    kept: Kept
    parts: Mapping[int, Past]

    @property
    def is_whole(self) -> bool:
        return len(self.parts) == self.kept.num_parts

    @property
    def first(self) -> Past:
        """The first that is left, and still to be computed if there is one. Who fetched it computes the rest, alone.

        Parts that have ended are not computed again, so that a fetch that left would keep them for itself for a while.
        """
        return self.parts[min((at for at, past in self.parts.items() if not past.has_ended), default=min(self.parts))]

    @property
    def has_ended(self) -> bool:
        return self.is_whole and all(past.has_ended for past in self.parts.values())

    def completed(self, lowered: Sequence[GenerationRequest], seen: Mapping[int, int]) -> tuple[Past, ...]:
        """Return all parts, those that were lost to be computed anew.

        lowered: what the request asks for;  seen: tokens that the client has, by choice
        """
        numerics = {past.request.model.base: past.numerics for past in self.parts.values() if past.numerics}
        lost = {part: each for part, each in enumerate(lowered) if part not in self.parts}
        anew = {
            part: Past(
                request=replace(
                    each,
                    kept=self.kept,
                    continued=tuple(Continued(num_counted=seen.get(part * each.n + at, 0)) for at in range(each.n)),
                ),
                numerics=numerics.get(each.model.base, ""),
            )
            for part, each in lost.items()
        }
        return tuple(past for _, past in sorted({**self.parts, **anew}.items()))


async def find(fleet: Fleet, response_id: str, owner: str, *, only_looks: bool = False) -> Found:
    """Ask every replica for what it keeps of an owner's stream; what still runs of it ends there.

    only_looks: nothing of it ends or is claimed
    Raises NotFound; and Unavailable where a replica may have more of it that is not known yet or did not answer, or
    where another request has just fetched it.
    """
    (staying, leaving), claim = fleet.backends, "" if only_looks else secrets.token_hex(8)
    recalled = [_recall(each, response_id, owner, claim, may_be_gone=False) for each in staying]
    recalled += [_recall(each, response_id, owner, claim, may_be_gone=True) for each in leaving]
    answers = await asyncio.gather(*recalled)
    streams: dict[str, Found] = {}
    for past in (past for answer in answers for past in answer or ()):
        if (kept := past.request.kept) is not None:
            parts = streams[kept.response_id].parts if kept.response_id in streams else {}
            part = past.request.part
            best = max(parts.get(part, past), past, key=_progress)
            streams[kept.response_id] = Found(kept=kept, parts={**parts, part: best})
    found = max(streams.values(), key=lambda each: (each.is_whole, each.kept.created), default=None)
    if (found is None or not found.is_whole) and (None in answers or not fleet.is_known):
        raise Unavailable("Replicas that may have this stream do not answer yet.", None, {"retry_after_s": AGAIN_S})
    if found is None:
        raise NotFound("not here")
    if found.first.is_taken and not found.has_ended and not only_looks:
        raise Unavailable("Another request is fetching this stream.", None, {"retry_after_s": AGAIN_S})
    return found


async def _recall(
    backend: Backend, response_id: str, owner: str, claim: str, *, may_be_gone: bool
) -> tuple[Past, ...] | None:
    """Return what a replica keeps; None where it may have the stream and did not answer.

    may_be_gone: it was removed, so that one which cannot be reached keeps nothing any more
    """
    try:
        async with patience(ANSWER_S):
            return await backend.recall(response_id, owner, claim)
    except TimeoutError:
        return None
    except Exception:
        return () if may_be_gone else None


def _progress(past: Past) -> tuple[int, int, bool]:
    """Of two records of one completion, the one that tells more leaves less to compute; the newer is not taken."""
    num_ends = sum(each.finish is not None for each in past.deltas)
    return sum(len(each.token_ids) for each in past.deltas), num_ends, not past.is_taken
