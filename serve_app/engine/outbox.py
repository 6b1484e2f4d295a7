"""Deltas on their way to one router: what has gathered since the last frame leaves as one frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from serve_app.core.delta import Delta, Frame, Load


class Outbox:
    """A buffer that is emptied as fast as its reader reads, without a timer.

    A reader that keeps up gets a frame per step; a slower one gets fewer, larger frames.
    """

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._load = Load()
        self._has_news = asyncio.Event()
        self._is_closed = False
        self.has_reader = False

    def put(self, deltas: Sequence[Delta], load: Load) -> None:
        self._deltas += deltas
        self._load = load
        self._has_news.set()

    def close(self) -> None:
        self._is_closed = True
        self._has_news.set()

    async def frames(self) -> AsyncGenerator[Frame, None]:
        """Yield frames until closed; to one reader only."""
        self.has_reader = True
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                yield Frame(deltas=tuple(deltas), load=self._load)
            elif self._is_closed:
                return
