"""Streams that their clients fetch anew: found where replicas keep them, whichever routers had them before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from serve_app.core.backend import Backend
from serve_app.core.errors import NotFound, Unavailable
from serve_app.core.progress import Past
from serve_app.core.request import Kept
from serve_app.router.fleet import Fleet
from serve_app.router.patience import patience

ANSWER_S = 4.0
"""For so long a client waits for replicas that may have its stream."""
AGAIN_S = 1.0
"""After how long a client asks again that came while a replica did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stream as far as it was told. parts: its prompts, in order"""

    kept: Kept
    parts: tuple[Past, ...]


async def find(fleet: Fleet, response_id: str, owner: str) -> Found:
    """Ask every replica for what it keeps of an owner's stream; what still runs of it ends there.

    Raises NotFound, and Unavailable where a replica did not answer that may have it, or of a model none is known yet.
    """
    staying, leaving = fleet.backends
    recalled = [_recall(each, response_id, owner, may_be_gone=False) for each in staying]
    recalled += [_recall(each, response_id, owner, may_be_gone=True) for each in leaving]
    answers = await asyncio.gather(*recalled)
    pasts = [past for answer in answers for past in answer or ()]
    streams: dict[str, dict[int, Past]] = {}
    kept: dict[str, Kept] = {}
    for past in pasts:
        if (of := past.request.kept) is not None:
            kept[of.response_id] = of
            parts = streams.setdefault(of.response_id, {})
            part = int(past.request.request_id.split("/")[1])
            parts[part] = max(parts.get(part, past), past, key=_progress)
    whole = [each for each in kept.values() if len(streams[each.response_id]) == each.num_parts]
    if whole:
        newest = max(whole, key=lambda each: each.created)
        return Found(kept=newest, parts=tuple(past for _, past in sorted(streams[newest.response_id].items())))
    if not staying or None in answers or fleet.loading:  # a router that has just begun may not know all yet
        raise Unavailable("Replicas that may have this stream do not answer yet.", None, {"retry_after_s": AGAIN_S})
    raise NotFound("not here")


async def _recall(backend: Backend, response_id: str, owner: str, *, may_be_gone: bool) -> tuple[Past, ...] | None:
    """Return what a replica keeps; None where it may have the stream and did not answer.

    may_be_gone: it was removed, so that one which cannot be reached keeps nothing any more
    """
    try:
        async with patience(ANSWER_S):
            return await backend.recall(response_id, owner)
    except TimeoutError:
        return None
    except Exception:
        return () if may_be_gone else None


def _progress(past: Past) -> tuple[int, int]:
    """Of two records of one completion, the one that tells more goes on with less to compute."""
    return sum(len(each.token_ids) for each in past.deltas), sum(each.finish is not None for each in past.deltas)
