"""What a router and the proxy before it agree on, so that pieces of streams go from one to the other past Serve.

Serve hands on each message of a response by itself, over gRPC: that takes proxy and router a tenth of a millisecond
each and per token. Where both are on one machine, all pieces that a router has at a time go over one local socket
instead. Serve still brings the request, the beginning of its response and its end, and so still knows what runs, whom
to wait for and whom to cancel.

    proxy  → router   with the request: which socket, and a number that nobody can guess
    router → proxy    on the socket: a hello, then frames, each a number and a piece
    proxy  → router   on the socket: a welcome, then signals, each a number and whether its client takes nothing more
    router → proxy    by Serve: which hello a response began with, and of how many frames it was when it ends

Sockets lie in a folder of this user's alone. Whoever cannot reach one, as on another machine, goes through Serve.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from starlette.types import Scope

HEADER = b"x-serve-app-shortcut"
"""Between the two alone: of a client it is taken away."""
LINE = "serve_app.line"
"""A key of the message with which a response begins: the hello of the connection that its pieces come on."""
NUM_PIECES = "serve_app.num_pieces"
"""A key of the message with which a response ends: how many came there."""
NUMBER_BYTES = 16
WELCOME = b"\x01"
HEAD = struct.Struct(f"<{NUMBER_BYTES}sI")
"""Of a frame: the number of a response, and how many bytes of it follow."""
SIGNAL = struct.Struct(f"<{NUMBER_BYTES}s?")
"""The number of a response, and whether nothing more of it is wanted for now."""
MAX_PIECE = 65536
"""Bytes in a frame; a longer piece is several."""
PATTERN = re.compile(rb"([0-9a-f]{16}):([0-9a-f]{32})")


class Frames:
    """Takes apart what comes on the socket, in whatever pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Number and piece of each frame that ends in it."""
        data = self._rest + data
        at = 0
        while len(data) - at >= HEAD.size:
            number, num_bytes = HEAD.unpack_from(data, at)
            end = at + HEAD.size + num_bytes
            if end > len(data):
                break
            yield number, data[at + HEAD.size : end]
            at = end
        self._rest = data[at:]


def framed(number: bytes, piece: bytes) -> list[bytes]:
    """The frames of a piece."""
    parts = [piece[at : at + MAX_PIECE] for at in range(0, len(piece), MAX_PIECE)]
    return [HEAD.pack(number, len(part)) + part for part in parts]


def new_socket_name() -> str:
    return secrets.token_hex(8)


def new_number() -> bytes:
    """Whoever does not know it can write into no response, not even from within the machine."""
    return secrets.token_bytes(NUMBER_BYTES)


def offer(scope: Scope, name: str, number: bytes) -> None:
    """Have this request say where pieces of its response may go."""
    scope["headers"] = [*scope["headers"], (HEADER, f"{name}:{number.hex()}".encode())]


def without_offer(scope: Scope) -> None:
    """Take away what a client sent under this name."""
    scope["headers"] = [each for each in scope["headers"] if each[0] != HEADER]


def offered(scope: Scope) -> tuple[str, bytes] | None:
    """Name of the socket and number. None where there is no offer, or it came past every proxy and is none."""
    values = [value for name, value in scope["headers"] if name == HEADER]
    found = PATTERN.fullmatch(values[0]) if len(values) == 1 else None
    return (found[1].decode(), bytes.fromhex(found[2].decode())) if found else None


def path_of(name: str) -> str:
    return str(folder() / f"{name}.sock")


def folder() -> Path:
    return Path(tempfile.gettempdir()) / f"serve_app-{os.getuid()}"


def own_folder() -> Path:
    """The same, made where it is not there. Raises OSError where others could reach into it."""
    found = folder()
    found.mkdir(mode=0o700, exist_ok=True)
    told = found.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.getuid() or told.st_mode & 0o077:
        raise PermissionError(f"{found} is not a folder of this user alone")
    return found
