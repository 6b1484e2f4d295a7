"""Completions of one prompt, which begin when it is computed."""

from __future__ import annotations

from serve_app.engine.scheduler.scheduler import Scheduler
from serve_app.engine.scheduler.sequence import Sequence


def start_siblings(leader: Sequence, scheduler: Scheduler) -> None:
    """Fork the computed prompt, all but its last token, whose logits each sibling needs for itself.

    As many as may be copied at once; the others follow with the next steps, or queue where there is no room.
    """
    shared = leader.prompt_length - 1
    siblings = leader.siblings
    if leader.record is not None:
        for sibling in siblings:
            sibling.record = leader.record.fork(shared)
    while siblings and scheduler.may_copy and scheduler.place_beside(leader, siblings[0], shared):
        del siblings[0]  # not earlier: where placing fails, it is lost with its leader and its client is told
    if scheduler.may_copy or leader.is_finished:
        while siblings:
            scheduler.waiting.push_front(siblings.pop())
