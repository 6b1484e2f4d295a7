"""What a command ends with, and the failures that end one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class Exit(IntEnum):
    """Exit codes; each command documents no others."""

    DONE = 0
    FAILED = 1
    MISUSED = 2
    UNREACHABLE = 3
    REFUSED = 4
    SERVICE_FAILED = 5
    FAULT = 70
    INTERRUPTED = 130


MEANINGS: Mapping[Exit, str] = MappingProxyType(
    {
        Exit.DONE: "it was done; of a check: nothing is wrong",
        Exit.FAILED: "it could not be done here, or a check found something wrong",
        Exit.MISUSED: "there is no such command, option or value; the nearest one is named",
        Exit.UNREACHABLE: "no service answers at the address",
        Exit.REFUSED: "the service refused the request: a wrong parameter, an unknown model, a missing key",
        Exit.SERVICE_FAILED: "the service is full, still loading, failed, or broke off; the same request may do later",
        Exit.FAULT: "a fault of serve_app itself; `SERVE_APP_DEBUG=1` shows where",
        Exit.INTERRUPTED: "a person interrupted it",
    }
)
"""By code, for the documents."""


class CommandFailed(Exception):
    """What was asked cannot be done; the message is for a person and names the next step where there is one."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code
