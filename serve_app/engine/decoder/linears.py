"""Linears as this machine computes them fastest: weights laid out once, and one product for all that share an input."""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.engine.decoder.quantized_linear import QuantisedLinear, join_linears
from serve_app.engine.decoder.stored import StoredLinear, Widening, plain_linear
from serve_app.kernels.interface import laid_out, may_read
from serve_app.kernels.openmp import alone
from serve_app.kernels.torch_private import lay_out, memory_of, multiply, onednn_has

NUM_ROWS = 8
"""For how many rows oneDNN is asked to lay weights out. For one row it makes another form, slower from 8 on."""

MIN_SIZE = 1 << 19
"""Entries of a weight that is laid out. A call of oneDNN's costs 25 µs before it begins; plain kernels do not."""

MIN_OWN_SIZE = 1 << 13
"""The same if our own kernel reads what is laid out."""


class OneDnnWeight:
    """A linear's weight as oneDNN's kernels read it.

    torch's plain kernels lay a weight out anew in every call.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [outputs, inputs];  bias: [outputs]"""
        self.packed = lay_out(weight, NUM_ROWS)
        self.num_bytes = weight.nbytes
        self._bias = bias
        self.ours = laid_out(self.packed, bias)
        if self.ours is None and may_read(weight.shape, weight.dtype):
            self._lay_out_for_ours(weight)

    def _lay_out_for_ours(self, weight: Tensor) -> None:
        """Lay a weight out for one thread: for many, oneDNN takes smaller blocks (from 16 on for Qwen2.5-0.5B)."""
        with alone():
            packed = lay_out(weight, NUM_ROWS)
        self.ours = laid_out(packed, self._bias)
        if self.ours is not None:
            self.packed = packed

    @property
    def dtype(self) -> torch.dtype:
        return self.packed.dtype

    @property
    def dense(self) -> Tensor:
        """[outputs, inputs], a plain copy."""
        return self.packed.to_dense()

    def __call__(self, x: Tensor) -> Tensor:
        if self.ours is not None and self.ours.takes(x):
            return self.ours(x)
        return multiply(x, self.packed, self._bias)


class PackedLinear(nn.Module):
    """A linear whose weight is kept as kernels of this machine read it, and in no other form.

    kept: oneDNN's form to begin with; another may take its place while the model computes
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: [outputs, inputs];  bias: [outputs]"""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.kept: OneDnnWeight | HalfWeight = OneDnnWeight(weight, self.bias)

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs], a plain copy."""
        return self.kept.dense

    @property
    def frame(self) -> Tensor:
        """Return a tensor of the weight's shape, dtype and device that takes no memory."""
        return torch.empty(1, dtype=self.kept.dtype).expand(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.kept(x)


WholeLinear: TypeAlias = PackedLinear | nn.Linear | QuantisedLinear


class JointLinear:
    """Linears that read the same input, as one product: `whole`, whose outputs are theirs one behind the other."""

    def __init__(self, linears: Sequence[Any], widening: Widening | None = None) -> None:
        """linears: of one kind and with the same inputs, and all with a bias or none
        widening: for those that are stored in fewer bits
        """
        self.whole = _whole(linears, widening)
        self._asked: Tensor | None = None
        self._answer: Tensor | None = None

    def part(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Outputs begin … end-1. The product is kept from the first part to the last, while the input is the same."""
        answer = self._answer if self._asked is x else None
        if answer is None:
            answer = self.whole(x)
        is_last = end == self.whole.out_features
        self._asked, self._answer = (None, None) if is_last else (x, answer)
        return answer[..., begin:end]


class LinearPart(nn.Module):
    """Some outputs of a joint linear, in the place of the linear that they were, for modules that ask for one."""

    def __init__(self, joint: JointLinear, begin: int, end: int) -> None:
        super().__init__()
        self.joint = joint
        self.begin, self.end = begin, end
        self.in_features, self.out_features = joint.whole.in_features, end - begin
        # so that who counts what a model holds finds them, once
        self._parameters.update({f"whole_{name}": each for name, each in joint.whole.named_parameters()})

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs]"""
        return self.joint.whole.weight[self.begin : self.end]

    @property
    def frame(self) -> Tensor:
        """Return a tensor of the weight's shape, dtype and device; its numbers mean nothing."""
        whole = self.joint.whole
        return (whole.weight if isinstance(whole, nn.Linear) else whole.frame)[self.begin : self.end]

    @property
    def bias(self) -> Tensor | None:
        bias = self.joint.whole.bias
        return None if bias is None else bias[self.begin : self.end]

    def forward(self, x: Tensor) -> Tensor:
        return self.joint.part(x, self.begin, self.end)


def pays(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether a weight is computed faster laid out; dtype: in which it will be computed, if in another."""
    dtype = dtype or weight.dtype
    if weight.device.type != "cpu" or weight.layout != torch.strided or not torch.backends.mkldnn.is_available():
        return False
    min_size = MIN_OWN_SIZE if weight.dim() == 2 and may_read(weight.shape, dtype) else MIN_SIZE
    return weight.numel() >= min_size and (dtype == torch.float32 or cpu_is_fast(dtype))


def unwrapped(module: Any) -> Any:
    """Return the module inside adapters that may be wrapped around it."""
    return getattr(module, "base", module)


def cpu_is_fast(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products of this 16-bit dtype."""
    return torch.backends.mkldnn.is_available() and onednn_has(dtype)


def join(linears: Sequence[Any], widening: Widening | None = None) -> list[LinearPart]:
    """Lay linears out as one, and return the part that each of them was."""
    joint = JointLinear(linears, widening)
    parts, begin = [], 0
    for linear in linears:
        parts.append(LinearPart(joint, begin, begin + linear.out_features))
        begin += linear.out_features
    return parts


def can_join(linears: Sequence[Any]) -> bool:
    """Return whether linears can be joined: one input size and one kind, plain or in few bits."""
    if not all(type(linear) in (nn.Linear, StoredLinear, QuantisedLinear) for linear in linears):
        return False
    kinds = {(type(linear), linear.in_features, linear.bias is None, _numbers(linear)) for linear in linears}
    return len(kinds) == 1


def _numbers(linear: Any) -> object:
    """Return what linears have to share to be joined."""
    return linear.layout if isinstance(linear, QuantisedLinear) else linear.weight.dtype


def _whole(linears: Sequence[Any], widening: Widening | None) -> WholeLinear:
    if isinstance(linears[0], QuantisedLinear):
        return join_linears(linears)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if not isinstance(linears[0], StoredLinear):
        weight = torch.cat([linear.weight.detach() for linear in linears])
    else:
        assert widening is not None, "nothing says in which numbers they are computed"
        weight = widening.together(linears)
        weight = weight if pays(weight) else weight.clone()  # which the next ones overwrite
    if pays(weight):
        return PackedLinear(weight, bias)
    return plain_linear(weight, bias)


LOSS = 2.0**-24
"""How far a whole weight may be from what it is kept as, relative to its norm: what float32 itself rounds by.

Checkpoints in bfloat16 keep well within: float16 has three bits more, and lacks none but of numbers so small beside
the others (2^-17 absolute; 2^-31 of the largest where the weight is scaled) that they add nothing that float32 shows.
"""
LARGEST = 2.0**15
"""A scaled weight's largest number comes to lie below; float16 ends at nearly twice that."""
LEAST = 2.0**-14
"""A weight whose largest number is below is scaled: what is lost of it could not be told in float32."""
MOST_FACTOR = 2.0**60
LOOKED_AT = 16
"""One row of so many."""
TRIED_SIZES = ((1, 33, 7), (3, 512, 40), (8, 64, 130))


class HalfWeight:
    """A linear's weight in float16, as FBGEMM's kernels read it. Inputs, sums and outputs are float32.

    A step of few rows takes as long as reading its weights, which is halved. Laying out one number takes ten times as
    long as oneDNN's.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, factor: float) -> None:
        """weight: [outputs, inputs] float32;  bias: [outputs];  factor: by which the weight is kept, of `factor_for`"""
        self.num_bytes = weight.numel() * 2
        self._factor = factor
        scaled = weight.detach() if factor == 1.0 else weight.detach() * factor
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(scaled, bias)
        self._multiply = torch.ops.quantized.linear_dynamic_fp16.default

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return torch.float32

    @property
    def dense(self) -> Tensor:
        """[outputs, inputs] float32, a plain copy."""
        weight: Tensor = torch.ops.quantized.linear_unpack_fp16(self._packed)[0]
        return weight if self._factor == 1.0 else weight / self._factor

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., inputs] float32. Returns [..., outputs] float32."""
        y: Tensor = self._multiply(x if self._factor == 1.0 else x / self._factor, self._packed)
        return y


def factor_for(weight: Tensor) -> float | None:
    """Return the power of two by which a weight fits float16; None if it loses numbers, or there is no kernel."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not has_kernel():
        return None
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if not 0.0 < largest < math.inf:
        return None
    if LEAST < largest < LARGEST and _keeps(weight, 1.0):
        return 1.0
    factor = math.ldexp(LARGEST, -math.frexp(largest)[1])
    return factor if factor <= MOST_FACTOR and _keeps(weight, factor) else None


def _keeps(weight: Tensor, factor: float) -> bool:
    """Return whether every sixteenth row or so loses little enough."""
    sample = weight[:: max(1, min(LOOKED_AT, len(weight) // 8))] * factor
    lost = torch.linalg.vector_norm(sample.half().float() - sample)
    return float(lost) <= LOSS * float(torch.linalg.vector_norm(sample))


@functools.cache
def has_kernel() -> bool:
    """Return whether this torch multiplies float32 by weights in float16 and rounds nothing else."""
    try:
        return all(_is_exact(*sizes) for sizes in TRIED_SIZES)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def _is_exact(num_rows: int, inputs: int, outputs: int) -> bool:
    weight = (torch.arange(outputs * inputs).view(outputs, inputs) % 251 - 125) / 128
    x = 1 + torch.arange(num_rows * inputs).view(num_rows, inputs) % 17 / 2**20  # float16 would have made these 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = HalfWeight(weight, None, 1.0)(x)
    expected = (x.double() @ weight.double().T).float()
    scale = float(weight.abs().sum(1).max())
    return torch.allclose(got, expected, rtol=0, atol=scale * 2**-22)


ROWS_PER_BLOCK = (64, 48, 32, 16, 8)
INPUTS_PER_STRIP = (1, 2, 4)
NUM_COMPARED = 509
ROWS_AT_ONCE = 4096


class PackedEmbedding(nn.Module):
    """Rows of a packed linear's weight, by their numbers.

    oneDNN keeps a weight [outputs, inputs] as blocks of outputs, in which a strip of inputs of one output lies beside
    that of the next: [blocks, strips, outputs of a block, inputs of a strip]. `find` tries which; where none is right,
    nothing is read so.
    """

    embed_scale: Tensor | None

    def __init__(self, kept: OneDnnWeight, rows: Tensor, factor: Tensor | None) -> None:
        """rows: [blocks, outputs of a block, strips, inputs of a strip], a view of the head's memory"""
        super().__init__()
        self.embedding_dim = rows.shape[2] * rows.shape[3]
        self.num_embeddings = len(kept.packed)
        self.register_buffer("embed_scale", factor, persistent=False)
        self._dtype = kept.dtype
        self._read: Callable[[Tensor], Tensor] = functools.partial(_blocked_rows, kept, rows)

    @classmethod
    def find(cls, head: PackedLinear, embedding: nn.Embedding) -> PackedEmbedding | None:
        """Return the embedding as read from the head that it is tied to; None if the head's layout is unknown.

        Compares some hundred rows, the first and the last among them.
        """
        count = embedding.num_embeddings
        compared = torch.unique(torch.linspace(0, count - 1, min(count, NUM_COMPARED)).long())
        expected = embedding(compared)
        kept = head.kept
        if not isinstance(kept, OneDnnWeight):
            return None
        for rows in _guesses(kept):
            found = cls(kept, rows, getattr(embedding, "embed_scale", None))
            if torch.equal(found(compared), expected):
                return found
        return None

    @property
    def weight(self) -> Tensor:
        """[rows, inputs], a plain copy."""
        return self.read(torch.arange(self.num_embeddings))

    def read(self, ids: Tensor) -> Tensor:
        """ids: [...] int64. Returns [..., inputs]."""
        return self._read(ids).to(self._dtype)

    def downcast(self) -> bool:
        """Keep the rows in 16 bits of their own if that is exact; then the head's memory is not needed."""
        for dtype in (torch.bfloat16, torch.float16):
            rows = torch.empty(self.num_embeddings, self.embedding_dim, dtype=dtype)
            for ids in torch.arange(self.num_embeddings).split(ROWS_AT_ONCE):
                wide = self.read(ids)
                rows[ids[0] : ids[-1] + 1] = wide
                if not torch.equal(rows[ids[0] : ids[-1] + 1].to(wide.dtype), wide):
                    break
            else:
                self._read = functools.partial(F.embedding, weight=rows)
                return True
        return False

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.read(ids)
        return rows if self.embed_scale is None else rows * self.embed_scale.to(rows.dtype)


def _blocked_rows(_kept: OneDnnWeight, rows: Tensor, ids: Tensor) -> Tensor:
    """Return rows of a packed weight, whose memory is there as long as `_kept` is."""
    block = rows.shape[1]
    blocks = torch.div(ids, block, rounding_mode="floor")
    return rows[blocks, ids - blocks * block].flatten(-2)


def _guesses(kept: OneDnnWeight) -> list[Tensor]:
    """Return the views of a packed weight's memory that may be right."""
    memory = memory_of(kept.packed)
    if memory is None:
        return []
    # valid as long as the packed tensor is there
    flat = torch.frombuffer((ctypes.c_char * memory.num_bytes).from_address(memory.address), dtype=kept.packed.dtype)
    outputs, inputs = kept.packed.shape
    found = []
    for block in ROWS_PER_BLOCK:
        for strip in INPUTS_PER_STRIP:
            num_rows = -(-outputs // block) * block
            if inputs % strip == 0 and num_rows * inputs == flat.numel():
                found.append(flat.view(-1, inputs // strip, block, strip).transpose(1, 2))
    return found
