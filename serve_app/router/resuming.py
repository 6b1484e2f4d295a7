"""Streams that their clients fetch anew: found where replicas keep them, whichever routers had them before."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from serve_app.core.errors import NotFound, Unavailable
from serve_app.core.progress import Past
from serve_app.core.request import Kept
from serve_app.router.fleet import Fleet

AGAIN_S = 1.0
"""After how long a client asks again that came while a replica did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A stream as far as it was told. parts: its prompts, in order"""

    kept: Kept
    parts: tuple[Past, ...]


async def find(fleet: Fleet, response_id: str, owner: str) -> Found:
    """Ask every replica for what it keeps of an owner's stream; what still runs of it ends there.

    Raises NotFound, and Unavailable where a replica did not answer that may have it, or none is known.
    """
    asked = [backend.recall(response_id, owner) for backend in fleet.backends]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    pasts = [past for answer in answers if not isinstance(answer, BaseException) for past in answer]
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
    if not answers or any(isinstance(answer, BaseException) for answer in answers):
        raise Unavailable("Replicas that may have this stream do not answer yet.", None, {"retry_after_s": AGAIN_S})
    raise NotFound("not here")


def _progress(past: Past) -> tuple[int, int]:
    """Of two records of one completion, the one that tells more goes on with less to compute."""
    return sum(len(each.token_ids) for each in past.deltas), sum(each.finish is not None for each in past.deltas)
