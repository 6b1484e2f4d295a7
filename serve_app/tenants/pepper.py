"""The secret under which digests of keys are made: without it a stolen store opens no door."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from serve_app.tenants.errors import TenancyError

VARIABLE = "SERVE_APP_PEPPER"
DEFAULT_PEPPER = "serve_app.pepper"
MIN_CHARS = 32
NUM_BYTES = 32


def read_pepper(file: Path, environment: str | None) -> bytes:
    """The environment's pepper, or that of the file. Raises TenancyError where there is none, or one that is short."""
    if environment is not None:
        return _checked(environment, VARIABLE)
    try:
        return _checked(file.read_text(encoding="ascii").strip(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise TenancyError(
            f"There is no pepper: {file} cannot be read and {VARIABLE} is not set. Bring it back from your copy; the"
            " keys of the store were made under it."
        ) from error


def make_pepper(file: Path) -> None:
    """Write a new pepper that its owner alone may read; leave one that is there."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(secrets.token_hex(NUM_BYTES) + "\n")


def _checked(pepper: str, where: str) -> bytes:
    if len(pepper) < MIN_CHARS:
        raise TenancyError(f"The pepper in {where} must have at least {MIN_CHARS} characters; found {len(pepper)}.")
    return pepper.encode()


def fingerprint_of(pepper: bytes) -> int:
    """31 bits by which another pepper is told from this one; more than 0."""
    return int.from_bytes(hmac.digest(pepper, b"fingerprint of the pepper", hashlib.sha256)[:4]) % (2**31 - 1) + 1
