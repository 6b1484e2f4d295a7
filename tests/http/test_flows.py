"""A tenant has one flow whatever its keys, and who makes keys up has none but the address."""

from __future__ import annotations

from serve_app.http.flows import MAX_KEYS, Flows
from serve_app.http.slots import TENANT


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def test_keys_that_were_let_in_are_their_tenants_and_all_others_their_addresss() -> None:
    flows = Flows()
    assert not flows.has_tenants
    strangers = {flows.of(bearer(f"made up {number}"), "10.0.0.1") for number in range(100)} | {
        flows.of([], "10.0.0.1")
    }
    assert len(strangers) == 1
    assert flows.of([], "10.0.0.2") not in strangers
    flows.learn(bearer("a"), "acme")
    flows.learn([(b"x-api-key", b"b")], "acme")
    flows.learn(bearer("c"), "beta")
    flows.learn([], "nobody")
    acme = flows.of(bearer("a"), "10.0.0.1")
    assert acme == flows.of([(b"x-api-key", b"b")], "10.0.0.2")
    assert len({acme, flows.of(bearer("c"), "10.0.0.1"), *strangers}) == 3
    assert flows.has_tenants


def test_a_tenant_named_like_an_address_is_not_one() -> None:
    flows = Flows()
    flows.learn(bearer("a"), "10.0.0.1")
    assert flows.of(bearer("a"), "x") != flows.of([], "10.0.0.1")


def test_a_key_that_is_let_in_no_more_is_forgotten() -> None:
    flows = Flows()
    flows.learn(bearer("a"), "acme")
    flows.learn(bearer("a"), None)
    assert not flows.has_tenants
    assert flows.of(bearer("a"), "10.0.0.1") == flows.of([], "10.0.0.1")


def test_what_becomes_of_a_request_does_not_make_its_key_a_strangers_unless_a_router_says_so() -> None:
    flows = Flows()
    flows.note(bearer("a"), {"type": "http.response.start", "status": 200, TENANT: ("acme", 2.0)})
    flow = flows.of(bearer("a"), "10.0.0.1")
    for status in (408, 499, 500, 503):  # as Serve says by itself of clients that have gone and of routers
        flows.note(bearer("a"), {"type": "http.response.start", "status": status})
    assert flows.of(bearer("a"), "10.0.0.1") == flow == "of acme"
    assert flows.weight_of(flow) == 2.0
    flows.note(bearer("a"), {"type": "http.response.start", "status": 401})
    assert flows.of(bearer("a"), "10.0.0.1") == flows.of([], "10.0.0.1")


def test_no_more_keys_are_remembered_than_that() -> None:
    flows = Flows()
    for number in range(MAX_KEYS + 10):
        flows.learn(bearer(str(number)), "acme")
    known = [number for number in range(MAX_KEYS + 10) if flows.of(bearer(str(number)), "") != flows.of([], "")]
    assert known == list(range(10, MAX_KEYS + 10))


def test_a_key_is_the_same_whatever_is_sent_beside_it() -> None:
    """Else one tenant could have as many flows as it likes, and push the keys of all others out."""
    flows = Flows()
    flows.learn(bearer("b"), "beta")
    for number in range(MAX_KEYS + 10):
        sent = [*bearer("a"), (b"x-api-key", str(number).encode())]
        assert number == 0 or flows.of(sent, "10.0.0.1") == "of acme"
        flows.learn(sent, "acme")
    assert flows.of(bearer("b"), "10.0.0.1") == "of beta"


def test_all_addresses_of_one_network_of_ipv6_are_one() -> None:
    flows = Flows()
    assert len({flows.of([], f"2001:db8:1:2:{number:x}::1") for number in range(100)}) == 1
    assert flows.of([], "2001:db8:1:3::1") != flows.of([], "2001:db8:1:2::1")


def test_all_addresses_of_a_network_are_one_however_they_are_written() -> None:
    flows = Flows()
    own = {flows.of([], f"2001:db8::{number:x}:0:0:1") for number in range(1, 9)} | {flows.of([], "2001:db8::7")}
    assert len(own) == 1
    assert flows.of([], "2001:db8:0:1::7") not in own
    assert flows.of([], "::ffff:10.0.0.1") == flows.of([], "10.0.0.1") != flows.of([], "::ffff:10.0.0.2")
