"""What a model keeps in the forms that kernels read, which are no buffers of its modules."""

from __future__ import annotations

from torch import nn

from serve_app.engine.decoder.linears import LinearPart, PackedLinear


def packed_linears(module: nn.Module) -> list[PackedLinear]:
    """Each once, joint ones as a whole."""
    found = [each.joint.whole if isinstance(each, LinearPart) else each for each in module.modules()]
    return list({id(each): each for each in found if isinstance(each, PackedLinear)}.values())


def packed_bytes(module: nn.Module) -> int:
    return sum(each.kept.num_bytes for each in packed_linears(module))
