"""Keys: made once, shown once, kept as digests that only the holder of the pepper can compute."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from pathlib import Path

from serve_app.core.adapters import NOTHING_PUBLISHED, AdapterSet
from serve_app.core.errors import Unauthenticated, Unavailable
from serve_app.core.tenants import NOBODY, Identity, Scope, Tenant
from serve_app.tenants.errors import TenancyError

PREFIX = "sa-"
KEY = re.compile(r"sa-[A-Za-z0-9_-]{43}")
"""256 random bits in base64url (RFC 4648) behind the prefix."""
NUM_KEY_BYTES = 32
NUM_ID_BYTES = 6
NO_DIGEST = "0" * 64
UNKNOWN: tuple[Key | None, Identity] = (None, NOBODY)
RETRY_S = 2
VARIABLE = "SERVE_APP_PEPPER"
DEFAULT_PEPPER = "serve_app.pepper"
MIN_CHARS = 32
NUM_PEPPER_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a tenant, as it is kept.

    id:     names it in lists and in the ledger; tells nothing of the key
    digest: HMAC-SHA256 of the key under the pepper, hexadecimal
    created_at, expires_at, revoked_at: Unix seconds; None is never
    """

    id: str
    tenant: str
    digest: str
    scopes: frozenset[Scope]
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Whether it opens the door at that time."""
        is_unexpired = self.expires_at is None or now < self.expires_at
        return is_unexpired and (self.revoked_at is None or now < self.revoked_at)


def new_key() -> str:
    """A key that nobody has seen."""
    return PREFIX + secrets.token_urlsafe(NUM_KEY_BYTES)


def new_key_id() -> str:
    return f"key-{secrets.token_hex(NUM_ID_BYTES)}"


def digest_of(key: str, pepper: bytes) -> str:
    """What is kept of a key."""
    return hmac.digest(pepper, key.encode(), hashlib.sha256).hex()


class Directory:
    """Unchanging; another one takes its place when something was changed.

    pepper:  under which digests were made
    version: grows with every change of what is kept
    origins: pages of these may call with some tenant's key
    published: adapters, as they were then or later; None where nothing was heard of them
    """

    def __init__(
        self,
        tenants: Iterable[Tenant],
        keys: Iterable[Key],
        *,
        pepper: bytes,
        version: int = 0,
        published: AdapterSet | None = NOTHING_PUBLISHED,
    ) -> None:
        self.version = version
        self.published = published
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self._keys = {
            key.digest: (key, Identity(tenant=self.tenants[key.tenant], key_id=key.id, scopes=key.scopes))
            for key in keys
            if key.tenant in self.tenants
        }
        self._by_id = {key.id: key for key, _ in self._keys.values()}
        self._pepper = pepper
        self.origins = frozenset(origin for tenant in self.tenants.values() for origin in tenant.cors_origins)

    def identify(self, presented: str | None, now: float) -> Identity:
        """Whose key it is. What is said does not tell a key that never was from one that no longer is.

        now: Unix seconds
        Raises Unauthenticated.
        """
        if not presented:
            raise Unauthenticated("This service asks for a key: send it as `Authorization: Bearer sa-…`.")
        is_key = KEY.fullmatch(presented) is not None
        digest = digest_of(presented if is_key else "", self._pepper)
        key, bearer = self._keys.get(digest, UNKNOWN)
        is_same = hmac.compare_digest(digest, NO_DIGEST if key is None else key.digest)
        if key is None or not is_same or not key.is_valid(now):
            raise Unauthenticated("The key that was sent is unknown, has expired or was revoked.")
        return bearer

    def with_published(self, published: AdapterSet) -> Directory:
        """Return the same directory with these adapters."""
        made = copy(self)
        made.published = published
        return made

    def is_good(self, key_id: str, now: float) -> bool:
        """Return whether the key of this id still opens the door (Unix seconds); who heard nothing shuts none out."""
        key = self._by_id.get(key_id)
        return self is NOTHING_HEARD or (key is not None and key.is_valid(now))


NOTHING_HEARD = Directory((), (), pepper=b"", version=-1, published=None)


class KeyCache:
    """Holds the directory that a router heard of last, and identifies keys by it.

    grace_s: what was heard last is good for so long; then nobody is let in

    Times called `heard_at` and `at` are of one monotonic clock, in seconds.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.grace_s = grace_s
        self.directory = NOTHING_HEARD
        self._heard_at = -math.inf

    def hear(self, directory: Directory | None, heard_at: float) -> None:
        """directory: None says that what is held is what there is

        What was asked for earlier than what is held, and comes later, is passed over.
        """
        if heard_at < self._heard_at:
            return
        if directory is not None:
            self.directory = directory
        self._heard_at = heard_at

    def identify(self, presented: str | None, *, now: float, at: float) -> Identity:
        """now: Unix seconds. Raises Unauthenticated; Unavailable where nothing was heard for too long."""
        if self.directory is NOTHING_HEARD or at - self._heard_at > self.grace_s:
            message = "The service cannot tell whose keys are good at the moment; retry."
            raise Unavailable(message, None, {"retry_after_s": RETRY_S})
        return self.directory.identify(presented, now)


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
        opened.write(secrets.token_hex(NUM_PEPPER_BYTES) + "\n")


def _checked(pepper: str, where: str) -> bytes:
    if len(pepper) < MIN_CHARS:
        raise TenancyError(f"The pepper in {where} must have at least {MIN_CHARS} characters; found {len(pepper)}.")
    return pepper.encode()


def fingerprint_of(pepper: bytes) -> int:
    """31 bits by which another pepper is told from this one; more than 0."""
    return int.from_bytes(hmac.digest(pepper, b"fingerprint of the pepper", hashlib.sha256)[:4]) % (2**31 - 1) + 1
