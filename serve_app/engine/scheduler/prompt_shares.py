"""How much of each prompt a step computes, where it cannot compute all that is missing."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_app.core.shares import Share
from serve_app.engine.scheduler.counters import Counters
from serve_app.engine.scheduler.filling import Claim, filled
from serve_app.engine.scheduler.pace import SHORT_PROMPT
from serve_app.engine.scheduler.sequence import Sequence
from serve_app.engine.scheduler.turns import Standing, turn_key


def reasons_to_hurry(prompts: Items[Sequence], decoding: Items[Sequence]) -> list[int]:
    """The tokens that each prompt behind the first misses; where a flow would stutter that has no prompt here, of each
    flow behind the first only those of its oldest prompt.

    So who sends many short prompts at once stretches the steps of its own sequences, and nobody else's; and of many who
    send one each, none waits for all others before it.

    prompts: oldest first
    """
    oldest: dict[str, int] = {}
    for each in prompts:
        oldest.setdefault(each.request.share.flow, each.num_missing)
    if any(each.request.share.flow not in oldest for each in decoding):
        return list(oldest.values())[1:]
    return [each.num_missing for each in prompts[1:]]


def short_and_unwatched(prompts: Items[Sequence], decoding: Items[Sequence]) -> int:
    """Tokens of short prompts that need not be spread over steps for the sake of those that decode: nobody reads of
    these before they end, and all are of one flow.

    They end together then, about as late in the mean, and the last of them sooner. (16 prompts of 64 at once, for 64
    tokens each: 1.04 times the tokens per second; 32 of 128: the same, and the last first token after 7.6 s for 9.3. Of
    prompts of 1024 nothing is gained, and most would end later.)
    """
    flow = prompts[0].request.share.flow
    if not all(each.request.is_read_whole and each.request.share.flow == flow for each in decoding):
        return 0
    if any(each.request.share.flow != flow for each in prompts):
        return 0
    return sum(each.num_missing for each in prompts if each.prompt_length <= SHORT_PROMPT)


def prompt_shares(prompts: Items[Sequence], left: int, counters: Counters, *, now: float) -> dict[int, int]:
    """Tokens of each prompt, by the sequence's `id`, `left` in all.

    prompts: oldest first;  now: as `started_at` of the sequences

    Flows get what brings their counters together, in the order of their turns; a class below others moves up while its
    oldest prompt is in work.
    """
    wanted = {id(sequence): sequence.num_missing for sequence in prompts}
    if left >= sum(wanted.values()):
        return wanted
    groups: dict[tuple[str, str], list[Sequence]] = {}
    for sequence in prompts:
        share = sequence.request.share
        groups.setdefault((share.flow, share.priority), []).append(sequence)
    if len(groups) == 1:
        return _shares_of_one(prompts, left)
    claims = [_claim(group, counters, now=now, number=number) for number, group in enumerate(groups.values())]
    amounts = filled(claims, left, price=counters.rules.prefill_weight)
    shares: dict[int, int] = {}
    for group, amount in zip(groups.values(), amounts, strict=True):
        shares |= _shares_of_one(group, amount)
    return shares


def _claim(group: Items[Sequence], counters: Counters, *, now: float, number: int) -> Claim:
    rules, oldest = counters.rules, group[0]
    share: Share = oldest.request.share
    began_at = now if oldest.started_at is None else oldest.started_at
    since = max(began_at, now - rules.max_wait_s)  # in work already: age raises the class and no more
    standing = Standing(share=share, counter=counters.of(share.flow), since=since, number=number)
    wanted = sum(sequence.num_missing for sequence in group)
    return Claim(key=turn_key(standing, rules, now=now), weight=share.weight, wanted=wanted)


def _shares_of_one(prompts: Items[Sequence], left: int) -> dict[int, int]:
    """Half of what may be computed is the oldest's, the rest goes to those that miss least.

    So a short prompt does not wait for a long one, and a long one gets on however many short ones come.
    """
    others = sorted(prompts[1:], key=lambda each: each.num_missing)
    oldest = min(prompts[0].num_missing, left if not others else -(-left // 2))
    left -= oldest
    shares: dict[int, int] = {}
    for sequence in others:
        shares[id(sequence)] = min(sequence.num_missing, left)
        left -= shares[id(sequence)]
    shares[id(prompts[0])] = min(prompts[0].num_missing, oldest + left)
    return shares
