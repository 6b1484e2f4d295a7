"""What is packed comes out as it went in, and what is usual is no object in between."""

from __future__ import annotations

import pickletools
from dataclasses import fields, replace

import pytest

from serve_app.core.delta import Delta, Finish, FinishReason, Frame, Load, PromptReport, Recording, TokenLogprob
from serve_app.core.errors import EngineFailed
from serve_app.core.ledger import Spent
from serve_app.deployments.transport import pack, unpack

USUAL = Delta(request_id="cmpl-1/0", sample=1, text=" wörd", token_ids=(7, 8))
OTHERS = {
    "request_id": "cmpl-2/0",
    "sample": 3,
    "text": "",
    "token_ids": (),
    "logprobs": (TokenLogprob(token_id=7, text=" w", logprob=-0.5, offset=0),),
    "prompt": PromptReport(num_tokens=3, num_cached_tokens=1),
    "finish": Finish(reason=FinishReason.STOP, matched_stop="END", num_tokens=9),
    "recording": Recording(),
    "error": EngineFailed("lost"),
    "mu": 2.5,
}


@pytest.mark.parametrize("name", [field.name for field in fields(Delta)])
def test_a_delta_keeps_whatever_it_has(name: str) -> None:
    delta = replace(USUAL, **{name: OTHERS[name]})
    (found,) = unpack(pack(Frame(deltas=(delta,)))).deltas
    if name == "error":
        assert found.error is not None
        assert (type(found.error), found.error.message) == (EngineFailed, "lost")
        found = replace(found, error=delta.error)
    assert found == delta


def test_deltas_keep_their_order_and_the_frame_whatever_else_it_has() -> None:
    finished = replace(USUAL, finish=OTHERS["finish"])
    numbers = {field.name: number for number, field in enumerate(fields(Load), 1) if field.name != "spent"}
    load = Load(**numbers, spent=(Spent(flow="a", prompt_tokens=3, engine_ns=9), Spent(flow="b")))
    frame = Frame(deltas=(USUAL, finished, replace(USUAL, sample=2), USUAL), load=load, adapters_revision=7)
    assert all(getattr(frame, field.name) for field in fields(Frame)), "one more is to be carried"
    assert unpack(pack(frame)) == frame


def test_no_object_is_set_together_for_what_is_usual() -> None:
    def num_objects(packed: bytes) -> int:
        return sum(opcode.name in ("REDUCE", "BUILD", "NEWOBJ") for opcode, _, _ in pickletools.genops(packed))

    assert num_objects(pack(Frame(deltas=(USUAL,) * 32, load=Load(spent=(Spent(flow="a"),))))) == 0
    assert num_objects(pack(Frame(deltas=(replace(USUAL, finish=OTHERS["finish"]),)))) > 0
