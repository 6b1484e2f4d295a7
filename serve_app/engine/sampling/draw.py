"""Draws one token per row from what its chain leaves.

The fast way runs the chain on the likeliest tokens of many rows at once. It looks at no number of a device, as to look
is to wait. It settles a row when it is certain what happens to all other tokens: all dropped, or none. What it does not
settle is drawn with every token in view (`run_whole_chain`), row by row.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from serve_app.engine.decoder.memory import sent
from serve_app.engine.sampling.candidates import (
    BLOCK,
    ROWS_AT_ONCE,
    Rest,
    block_sums,
    block_weights,
    choose_candidates,
    sorted_largest,
    take_rows,
)
from serve_app.engine.sampling.noise import pick
from serve_app.engine.sampling.stages import (
    Parameters,
    Stage,
    can_drop,
    order_of,
    run_chain,
    run_whole_chain,
    stages_of,
    weights_of,
)
from serve_app.engine.scheduler.sequence import Sequence

NUM_CANDIDATES = 256
MAX_RACED = 4096
"""Tokens that race one by one. Where more are left, their blocks race first, which takes noise for fewer."""
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token.

    probability: in the distribution it was drawn from
    top:         the likeliest tokens of that distribution with their natural log-probabilities, where wanted
    """

    token_id: int
    probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """What the fast way drew for each row, where the logits are.

    token_ids: [rows] int64;  probabilities: [rows] float64, of what was drawn
    is_settled: [rows] bool; the others are to be drawn with every token in view
    """

    token_ids: Tensor
    probabilities: Tensor
    is_settled: Tensor


def draw_tokens(logits: Tensor, sequences: Items[Sequence], rows: Items[int] | None = None) -> list[Drawn]:
    """Draw one token per row. Changes nothing.

    logits: [any rows, vocab] float32, edited; each row drawn from has a finite one, -inf is out of play
    rows:   the sequences' rows; all in their order where left out
    """
    where = list(range(len(sequences)) if rows is None else rows)
    drawn: dict[int, Drawn] = {}
    choice = draw_fast(logits, sequences, where)
    facts = zip(choice.token_ids.tolist(), choice.probabilities.tolist(), choice.is_settled.tolist(), strict=True)
    for place, (token_id, probability, is_settled) in enumerate(facts):
        if is_settled:
            drawn[place] = Drawn(token_id, probability)
    for place, sequence in enumerate(sequences):
        if place not in drawn or _num_top(sequence):
            own = take_rows(logits, [where[place]])
            drawn[place] = draw_whole(own, sequence, known=drawn.get(place))
    return [drawn[place] for place in range(len(sequences))]


def draw_whole(logits: Tensor, sequence: Sequence, *, known: Drawn | None = None) -> Drawn:
    """Draw for one row, [1, vocab], with every token in view; known: what was drawn, if only its rivals are wanted."""
    parameters = Parameters.of_sequences([sequence], HOST)
    chain = stages_of(order_of(sequence.request.sampling))
    row = run_whole_chain(logits, chain, parameters.sent(logits.device))
    weights, vocab = weights_of(row)[0], logits.shape[-1]
    sums, keys = block_sums(weights[None]), parameters.keys.to(logits.device)
    if known is not None:
        token_id = known.token_id
    else:
        if int(torch.count_nonzero(weights)) <= MAX_RACED:
            ids = torch.nonzero(weights)[:, 0]
        else:
            block = int(pick(sums, vocab + torch.arange(sums.shape[-1], device=sums.device), keys))
            ids = torch.arange(block * BLOCK, min((block + 1) * BLOCK, vocab), device=sums.device)
        token_id = int(ids[pick(weights[ids][None], ids, keys)])
    total = torch.cumsum(sums, dim=-1)[0, -1]
    top: tuple[tuple[int, float], ...] = ()
    if num_top := min(_num_top(sequence), vocab):
        first = sorted_largest(row.logits, num_top)[1][0]
        pairs = zip(first.tolist(), (weights[first] / total).tolist(), strict=True)
        top = tuple((each, log(value)) for each, value in pairs if value > 0.0)
    return Drawn(token_id, float(weights[token_id] / total), top)


def draw_fast(logits: Tensor, sequences: Items[Sequence], rows: Items[int]) -> Choice:
    """Draw one token per row from its likeliest tokens, or from all of them where no stage drops any.

    As `draw_tokens`, but that a row may be left open; where a row has no finite logit, its token means nothing.
    """
    own = Parameters.of_sequences(sequences, HOST)
    parameters = own.sent(logits.device)
    order: list[int] = []
    choices: list[Choice] = []
    for chain, drops, places in _groups(sequences, own):
        for first in range(0, len(places), ROWS_AT_ONCE):
            few = places[first : first + ROWS_AT_ONCE]
            at = torch.tensor(few)
            there = parameters.of(sent(at, logits.device))
            found = take_rows(logits, [rows[place] for place in few])
            if drops:
                choices.append(_draw_few(found, chain, own.of(at), there))
            else:
                choices.append(_draw_all(found, chain, own.of(at), there))
            order += few
    return _in_order(order, choices, logits.device)


def _groups(sequences: Items[Sequence], own: Parameters) -> list[tuple[list[Stage], bool, list[int]]]:
    """Group sequences that run the same stages: the stages, whether they can drop tokens, and the sequences' places."""
    by_order: dict[tuple[str, ...], list[int]] = {}
    for place, sequence in enumerate(sequences):
        by_order.setdefault(order_of(sequence.request.sampling), []).append(place)
    groups = []
    for order, places in by_order.items():
        chain = stages_of(order)
        can = can_drop(chain, own).tolist()
        for drops in (False, True):
            if some := [place for place in places if can[place] is drops]:
                groups.append((chain, drops, some))
    return groups


def _draw_few(logits: Tensor, chain: Items[Stage], own: Parameters, parameters: Parameters) -> Choice:
    """Draw for rows from their likeliest tokens; own: the same parameters in the host's memory."""
    found = run_chain(choose_candidates(logits, NUM_CANDIDATES), chain, parameters, logits, own=own)
    weights = weights_of(found)
    columns = pick(weights, found.token_ids, parameters.keys)[:, None]
    probabilities = weights.gather(1, columns)[:, 0] / torch.cumsum(weights, dim=-1)[:, -1]
    return Choice(found.token_ids.gather(1, columns)[:, 0], probabilities, found.rest == Rest.GONE)


def _draw_all(logits: Tensor, chain: Items[Stage], own: Parameters, parameters: Parameters) -> Choice:
    """Draw from all tokens of each row: its blocks race, each with the weight of its tokens, then the winner's tokens.

    That is exact, since the highest of a group's Gumbel variables is one for their sum, and takes noise for one
    block and not for the vocabulary.
    """
    vocab, keys = logits.shape[-1], parameters.keys
    divisor = run_chain(choose_candidates(logits, 0), chain, parameters, logits, own=own).divisor
    sums, highest = block_weights(logits, list(range(len(logits))), divisor)
    blocks = pick(sums, vocab + torch.arange(sums.shape[-1], device=sums.device), keys)
    token_ids = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=sums.device)
    values = logits.gather(1, token_ids.clamp(max=vocab - 1)).double()
    weights = torch.exp((values - highest.double()[:, None]) / divisor[:, None]).masked_fill(token_ids >= vocab, 0.0)
    columns = pick(weights, token_ids, keys)[:, None]
    probabilities = weights.gather(1, columns)[:, 0] / torch.cumsum(sums, dim=-1)[:, -1]
    return Choice(token_ids.gather(1, columns)[:, 0], probabilities, torch.ones_like(blocks, dtype=torch.bool))


def _num_top(sequence: Sequence) -> int:
    """Return how many of the likeliest tokens of the distribution that is drawn from are to be told."""
    wanted = sequence.request.logprobs
    return wanted.top or 0 if wanted is not None and wanted.post_sampling else 0


def _in_order(order: list[int], choices: list[Choice], device: torch.device) -> Choice:
    """Put the parts' choices together; order: [rows], the places that they are for"""
    if len(choices) == 1 and order == sorted(order):
        return choices[0]
    places = sent(torch.argsort(torch.tensor(order)), device)
    parts = ([getattr(each, name) for each in choices] for name in ("token_ids", "probabilities", "is_settled"))
    return Choice(*(torch.cat(part).index_select(0, places) for part in parts))
