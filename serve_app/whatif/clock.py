"""An event loop whose time jumps to the next timer: hours pass in the time that their events take to compute."""

from __future__ import annotations

import asyncio
import selectors

BEGIN_S = 1.0
"""No time is 0, which some take for none."""


class Jump(selectors.SelectSelector):
    """Passes the time that it should wait, and never waits: nothing comes from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits, and nothing is left that could happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs coroutines on a clock of their own. The same coroutines give the same events every time."""

    def __init__(self) -> None:
        self._jump = Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now
