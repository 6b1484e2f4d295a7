"""Keys and whose they are."""

from __future__ import annotations

import hashlib

import pytest

from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Scope, Tenant
from serve_app.tenants.keys import KEY, Directory, Key, digest_of, new_key

PEPPER = b"p" * 32
ACME = Tenant(name="acme")


def key_of(secret: str, **changes: object) -> Key:
    fields = {"id": "key-1", "tenant": "acme", "digest": digest_of(secret, PEPPER), "scopes": frozenset({Scope.INFER})}
    return Key(**{**fields, "created_at": 0.0, **changes})  # type: ignore[arg-type]


def test_a_key_has_256_bits_behind_its_prefix_and_is_never_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(KEY.fullmatch(key) for key in made)


def test_what_is_kept_of_a_key_depends_on_the_pepper_and_does_not_hold_it() -> None:
    secret = new_key()
    assert digest_of(secret, PEPPER) != digest_of(secret, b"q" * 32)
    assert secret[3:] not in repr(key_of(secret))


def test_a_digest_is_the_hmac_sha256_of_the_key() -> None:
    """By its definition (RFC 2104), for which a hash of pepper and key together is no substitute."""
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in PEPPER.ljust(64, b"\0")) + b"sa-x").digest()
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in PEPPER.ljust(64, b"\0")) + inner)
    assert digest_of("sa-x", PEPPER) == outer.hexdigest()


def test_digests_are_compared_in_constant_time_whether_the_key_is_known_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("serve_app.tenants.keys.hmac.compare_digest", compare)
    secret, other = new_key(), new_key()
    directory = Directory([ACME], [key_of(secret)], pepper=PEPPER)
    directory.identify(secret, 1.0)
    with pytest.raises(Unauthenticated):
        directory.identify(other, 1.0)
    assert compared == [(digest_of(secret, PEPPER),) * 2, (digest_of(other, PEPPER), "0" * 64)]


def test_a_key_is_its_tenants() -> None:
    secret = new_key()
    found = Directory([ACME], [key_of(secret)], pepper=PEPPER).identify(secret, 1.0)
    assert (found.tenant, found.key_id, found.scopes) == (ACME, "key-1", frozenset({Scope.INFER}))


@pytest.mark.parametrize("presented", ["sa-", "sa-" + "x" * 43, "Bearer", "ключ", "sa-" + "x" * 10_000, "\x00"])
def test_what_is_no_key_is_refused(presented: str) -> None:
    with pytest.raises(Unauthenticated, match="unknown, has expired or was revoked"):
        Directory([ACME], [key_of(new_key())], pepper=PEPPER).identify(presented, 1.0)


def test_a_request_without_a_key_is_told_how_to_send_one() -> None:
    for nothing in (None, ""):
        with pytest.raises(Unauthenticated, match="Authorization: Bearer sa-"):
            Directory([ACME], [], pepper=PEPPER).identify(nothing, 1.0)


@pytest.mark.parametrize("end", ["expires_at", "revoked_at"])
def test_a_key_is_good_until_it_expires_or_is_revoked_and_not_after(end: str) -> None:
    secret = new_key()
    directory = Directory([ACME], [key_of(secret, **{end: 10.0})], pepper=PEPPER)
    assert directory.identify(secret, 9.9).tenant == ACME
    with pytest.raises(Unauthenticated):
        directory.identify(secret, 10.0)


def test_a_key_of_a_tenant_that_is_gone_opens_nothing() -> None:
    secret = new_key()
    with pytest.raises(Unauthenticated):
        Directory([], [key_of(secret)], pepper=PEPPER).identify(secret, 1.0)


def test_the_refusals_of_unknown_expired_and_revoked_keys_read_alike() -> None:
    expired, revoked = new_key(), new_key()
    kept = [key_of(expired, expires_at=1.0), key_of(revoked, id="key-2", revoked_at=1.0)]
    directory = Directory([ACME], kept, pepper=PEPPER)
    told = set()
    for presented in (expired, revoked, new_key()):
        with pytest.raises(Unauthenticated) as refusal:
            directory.identify(presented, 2.0)
        told.add(str(refusal.value))
    assert len(told) == 1
