"""Where the packed tokens of one step lie: positions, lanes, and which of them attend together."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from serve_app.engine.batch import Batch, Span

MAX_CHUNK_ROWS = 256  # queries of a chunk attended to at once, so that masks stay small


@dataclass(frozen=True, slots=True)
class Attended:
    """Queries of neighbouring lanes, `length` each, over the keys of those lanes.

    first_token: where they begin in the packed row
    first_lane, num_lanes: whose keys they see
    length:      queries per lane; more than one only for a single lane
    starts:      position of each lane's first query
    """

    first_token: int
    first_lane: int
    num_lanes: int
    length: int
    starts: tuple[int, ...]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.num_lanes * self.length

    @property
    def num_keys(self) -> int:
        """Positions of the longest lane, its queries included."""
        return max(self.starts) + self.length

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Which keys each query sees, [lanes, 1, length, keys] bool; None where each sees all of them.

        window: a query sees itself and so many positions before it less one; None sees all before it
        """
        if window not in self.masks:
            self.masks[window] = self._build_mask(window, device)
        return self.masks[window]

    def _build_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        fits_window = window is None or self.num_keys <= window
        if self.length == 1 and fits_window and len(set(self.starts)) == 1:
            return None
        starts = torch.tensor(self.starts, device=device)
        queries = starts[:, None] + torch.arange(self.length, device=device)  # [lanes, length]
        keys = torch.arange(self.num_keys, device=device)
        seen = keys <= queries[:, :, None]
        if not fits_window:
            seen &= keys > queries[:, :, None] - window
        return seen[:, None]


@dataclass(frozen=True, slots=True)
class Layout:
    """One step's tokens as tensors.

    token_ids, positions: [tokens] int64
    places:     [tokens] int64, lane * max_model_len + position: where keys and values are written
    logit_rows: [rows] int64, the tokens whose logits are wanted
    slots:      the adapter's slot of each token, -1 for the base
    """

    token_ids: Tensor
    positions: Tensor
    places: Tensor
    logit_rows: Tensor
    attended: tuple[Attended, ...]
    slots: tuple[int, ...]


def lay_out(batch: Batch, *, max_model_len: int, device: torch.device) -> Layout:
    """Pack a batch: one pass over its spans, one tensor per field."""
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    logit_rows: list[int] = []
    slots: list[int] = []
    for span in batch.spans:
        sequence = span.sequence
        assert sequence.lane is not None, f"{sequence} has no lane"
        first = len(token_ids)
        token_ids += sequence.token_ids[span.start : span.end]
        positions += range(span.start, span.end)
        base = sequence.lane * max_model_len
        places += range(base + span.start, base + span.end)
        slots += [sequence.slot] * span.length
        logit_rows += range(first, first + span.scores)
        if span.samples:
            logit_rows.append(first + span.length - 1)
    return Layout(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        places=torch.tensor(places, device=device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        attended=tuple(_group(batch)),
        slots=tuple(slots),
    )


def _group(batch: Batch) -> list[Attended]:
    """Put single tokens of neighbouring lanes and of like length together; cut chunks into tiles."""
    groups: list[Attended] = []
    run: list[Span] = []
    token = 0

    def end_run() -> None:
        if run:
            lane = run[0].sequence.lane
            assert lane is not None
            starts = tuple(span.start for span in run)
            groups.append(Attended(token - len(run), lane, len(run), 1, starts))
            run.clear()

    for span in batch.spans:
        lane = span.sequence.lane
        assert lane is not None
        if span.length > 1:
            end_run()
            for offset in range(0, span.length, MAX_CHUNK_ROWS):
                length = min(MAX_CHUNK_ROWS, span.length - offset)
                groups.append(Attended(token + offset, lane, 1, length, (span.start + offset,)))
        else:
            if run and not _belong_together(run[-1], span):
                end_run()
            run.append(span)
        token += span.length
    end_run()
    return groups


def _belong_together(left: Span, right: Span) -> bool:
    assert left.sequence.lane is not None
    neighbours = right.sequence.lane == left.sequence.lane + 1
    return neighbours and (left.start + 1).bit_length() == (right.start + 1).bit_length()
