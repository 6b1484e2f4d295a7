"""Has tokens that are computed anew in another way take the experts that they took before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from serve_app.engine.decoder.experts import expert_layers

Arguments = tuple[Any, ...]


class Routes:
    """Which experts every layer of a model chose for a run of tokens, and their weights.

    A choice between two that are nearly alike is a matter of rounding, and either is right; what follows from it is as
    far from the other as two different models are. Nothing for a dense model, or one whose experts are not known.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = expert_layers(module)
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within it all tokens are computed once."""

        def note(layer: int) -> Callable[[nn.Module, Arguments], None]:
            def hook(_: nn.Module, arguments: Arguments) -> None:
                self._chosen[layer] = (arguments[1], arguments[2])

            return hook

        with self._hooked(note):
            yield

    @contextmanager
    def following(self, start: int, length: int) -> Iterator[None]:
        """Within it `length` of these tokens are computed, from `start` on."""

        def follow(layer: int) -> Callable[[nn.Module, Arguments], Arguments]:
            def hook(_: nn.Module, arguments: Arguments) -> Arguments:
                noted = (each.narrow(-2, start, length) for each in self._chosen[layer])
                return (arguments[0], *noted, *arguments[3:])

            return hook

        with self._hooked(follow):
            yield

    @contextmanager
    def _hooked(self, make: Callable[[int], Callable[..., Arguments | None]]) -> Iterator[None]:
        with ExitStack() as hooks:
            for layer, part in self._layers.items():
                hooks.callback(part.register_forward_pre_hook(make(layer)).remove)
            yield
