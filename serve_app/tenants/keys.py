"""Keys: made once, shown once, kept as digests that only the holder of the pepper can compute."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

from serve_app.core.tenants import Scope

PREFIX = "sa-"
KEY = re.compile(r"sa-[A-Za-z0-9_-]{43}")
"""256 random bits in base64url (RFC 4648) behind the prefix."""
NUM_KEY_BYTES = 32
NUM_ID_BYTES = 6


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
