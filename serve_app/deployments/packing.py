"""Packs frames for their way from a replica to a router, which they take once per step.

Most deltas are a token and its text. Pickle takes a dataclass apart and sets it together again field by field, which
took longer than all else that was done for a token between the engine and the router.
"""

from __future__ import annotations

import pickle  # nosec B403 # what Ray carries between ours
from dataclasses import fields
from operator import attrgetter

from serve_app.core.delta import Delta, Frame, Load
from serve_app.core.ledger import Spent

Packed = tuple[str, int, str, tuple[int, ...]] | Delta
"""Request, sample, text and token ids of a delta that has nothing else; any other as it is."""

_LOAD_NAMES = tuple(field.name for field in fields(Load) if field.name != "spent")
_SPENT_NAMES = tuple(field.name for field in fields(Spent))
_load_values = attrgetter(*_LOAD_NAMES)
_spent_values = attrgetter(*_SPENT_NAMES)


def pack(frame: Frame) -> bytes:
    """The frame as bytes, which Ray carries as they are. `unpack` gives an equal one."""
    deltas, load = tuple(map(_packed, frame.deltas)), frame.load
    spent = tuple(map(_spent_values, load.spent))
    return pickle.dumps((deltas, _load_values(load), spent), pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> Frame:
    """The frame that a replica of ours has packed."""
    deltas, values, of_flows = pickle.loads(packed)  # nosec B301 # see there
    spent = tuple(Spent(**dict(zip(_SPENT_NAMES, each, strict=True))) for each in of_flows)
    load = Load(**dict(zip(_LOAD_NAMES, values, strict=True)), spent=spent)
    return Frame(deltas=tuple(map(_unpacked, deltas)), load=load)


def _packed(delta: Delta) -> Packed:
    return (delta.request_id, delta.sample, delta.text, delta.token_ids) if delta.is_bare else delta


def _unpacked(packed: Packed) -> Delta:
    if isinstance(packed, Delta):
        return packed
    request_id, sample, text, token_ids = packed
    return Delta(request_id=request_id, sample=sample, text=text, token_ids=token_ids)
