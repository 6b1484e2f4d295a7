"""Writes docs/pictures/terminal.svg anew from a real run: `python -m tests.docs.recording`.

A completion and a comparison, of the demo model in this process, on a port of the kernel's choice.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.cli.screen import URL_VARIABLE
from tests.console.served import Served, engine
from tests.docs.terminal import Frame, Screen, picture

REPOSITORY = Path(__file__).parents[2]
PICTURE = REPOSITORY / "docs" / "pictures" / "terminal.svg"
COLUMNS, ROWS = 100, 40
MAX_BYTES = 100_000
LIMIT_S = 240
COMPLETE = ["complete", "Once upon a time", "--model", "demo:pirate", "--max-tokens", "60", "--seed", "3"]
COMPARE = [
    "compare",
    "Once upon a time",
    "--models",
    "demo,demo:pirate,demo:shout",
    "--max-tokens",
    "32",
    "--seed",
    "3",
]


class Recorded:
    """A command of serve_app in a terminal, looked at every so often; each look is shown for so long."""

    def __init__(self, words: list[str], url: str, *, every_s: float, shown_s: float) -> None:
        self.screen = Screen(columns=COLUMNS)
        self.screen.write(f"\x1b[1m$ {shlex.join(['serve_app', *words])}\x1b[0m\r\n")
        self.frames = [Frame(lines=self.screen.lines, seconds=1.0)]
        self._every_s, self._shown_s = every_s, shown_s
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(REPOSITORY), URL_VARIABLE: url}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "serve_app", *words],
            cwd=REPOSITORY, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._output = ours

    def until(self, is_over: Callable[[str], object]) -> None:
        """Look until the screen, as text, or the end of the program says so."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(time.monotonic() + self._every_s):
            self._look()
            if is_over(self.text):
                return
            assert time.monotonic() < deadline, self.text
        self._look()

    def end(self) -> list[Frame]:
        """Ctrl-C where it still runs. What was seen, its end for a while longer."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            while self._read(time.monotonic() + self._every_s):
                pass
        self.process.wait(LIMIT_S)
        return [*self.frames[:-1], Frame(lines=self.frames[-1].lines, seconds=3.0)]

    @property
    def text(self) -> str:
        return "\n".join("".join(character for character, _ in line) for line in self.screen.lines)

    def _read(self, until: float) -> bool:
        """Whether the program still has the terminal."""
        while (left := until - time.monotonic()) > 0:
            if select.select([self._output], [], [], left)[0]:
                try:
                    piece = os.read(self._output, 65_536)
                except OSError:
                    return False
                self.screen.write(piece.decode(errors="replace"))
        return True

    def _look(self) -> None:
        if self.screen.lines != self.frames[-1].lines:
            self.frames.append(Frame(lines=self.screen.lines, seconds=self._shown_s))


def recorded(url: str) -> list[Frame]:
    """What a person sees who asks the service there."""
    frames: list[Frame] = []
    for words in (COMPLETE, COMPARE):
        asked = Recorded(words, url, every_s=0.1, shown_s=0.1)
        asked.until(lambda text: False)
        frames += asked.end()
    return frames


if __name__ == "__main__":
    served = Served(engine)
    drawn = picture(
        recorded(served.url), columns=COLUMNS, title="serve_app complete, then serve_app compare with three adapters"
    )
    served.close()
    assert len(drawn.encode()) <= MAX_BYTES, len(drawn.encode())
    PICTURE.write_text(drawn, encoding="utf-8")
    print(f"{PICTURE} has {PICTURE.stat().st_size} bytes")
