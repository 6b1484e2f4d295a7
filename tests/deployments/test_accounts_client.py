"""What a router asks Accounts for keys that it does not know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.core.errors import Unauthenticated
from serve_app.core.tenants import Scope, Tenant
from serve_app.deployments.transport import calls_of
from serve_app.router.accounts import SPACING_S, AccountsClient
from serve_app.router.idempotency import Answer, Claim, Standing
from serve_app.tenants.keys import Directory, Key, digest_of, new_key

PEPPER = b"p" * 32


class AskedAccounts:
    """A handle of Accounts that counts how often, and how often at once, it is asked for what changed."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.asked, self.most_at_once, self._at_once = 0, 0, 0
        self.does_answer = True
        self.told: list[object] = []
        self.claimed: Standing | None = None

    @property
    def directory(self) -> AskedAccounts:
        return self

    def options(self, **changes: Any) -> AskedAccounts:
        return self

    @property
    def claim(self) -> AskedAccounts:
        return self

    @property
    def deliver(self) -> AskedAccounts:
        return self

    def remote(self, *arguments: object) -> Any:
        self.told.append(arguments)
        return AskedAnswer(self, self.claimed if isinstance(arguments[0], Claim) else None)

    async def answer(self) -> Directory:
        self.asked += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        keys = [
            Key(id=f"k{at}", tenant="a", digest=digest_of(key, PEPPER), scopes=frozenset(Scope), created_at=0.0)
            for at, key in enumerate(self.keys)
        ]
        await asyncio.sleep(SPACING_S / 4)
        self._at_once -= 1
        if not self.does_answer:
            raise TimeoutError
        return Directory([Tenant(name="a")], keys, pepper=PEPPER, version=len(keys))


class AskedAnswer:
    def __init__(self, accounts: AskedAccounts, claimed: Standing | None) -> None:
        self._accounts, self._claimed = accounts, claimed

    def __await__(self) -> Any:
        found = yield from self._accounts.answer().__await__()
        return self._claimed or found

    def cancel(self) -> None:
        pass


def linked() -> tuple[AskedAccounts, AccountsClient]:
    accounts = AskedAccounts()
    handle: Any = accounts
    return accounts, AccountsClient(calls_of(handle), "router-0", grace_s=60.0)


async def test_a_key_is_good_once_it_is_made() -> None:
    accounts, link = linked()
    await link.look()
    for _ in range(3):
        accounts.keys.append(new_key())
        with pytest.raises(Unauthenticated):
            link.identify(accounts.keys[-1])
        await link.look_again(accounts.keys[-1])
        assert link.identify(accounts.keys[-1]).tenant.name == "a"


async def test_who_asks_while_a_look_is_under_way_has_one_that_began_later() -> None:
    accounts, link = linked()
    first = asyncio.create_task(link.look_again(new_key()))
    await asyncio.sleep(SPACING_S / 8)
    assert accounts.asked == 1, "it has read what there is, and not answered"
    accounts.keys.append(new_key())
    await link.look_again(accounts.keys[-1])
    assert link.identify(accounts.keys[-1]).key_id == "k0"
    await first


async def test_ten_thousand_unknown_keys_cost_a_few_looks_and_never_two_at_once() -> None:
    accounts, link = linked()
    await asyncio.gather(*(link.look_again(new_key()) for _ in range(10_000)))
    assert accounts.asked == 1
    began = asyncio.get_running_loop().time()

    async def hammer() -> None:
        for _ in range(5):
            await link.look_again(new_key())

    await asyncio.gather(*(hammer() for _ in range(20)))
    spent = asyncio.get_running_loop().time() - began
    assert accounts.asked <= 2 + spent / SPACING_S
    assert accounts.most_at_once == 1


async def test_nothing_is_asked_for_what_is_no_key_and_of_accounts_that_do_not_answer() -> None:
    accounts, link = linked()
    for presented in ("sa-short", "Basic abc", ""):
        await link.look_again(presented)
    assert accounts.asked == 0
    accounts.does_answer = False
    await link.look_again(new_key())
    await link.look_again(new_key())
    assert accounts.asked == 1


async def test_a_client_that_leaves_takes_no_look_from_others() -> None:
    accounts, link = linked()
    accounts.keys.append(new_key())
    one = asyncio.create_task(link.look_again(accounts.keys[0]))
    other = asyncio.create_task(link.look_again(accounts.keys[0]))
    await asyncio.sleep(0)
    one.cancel()
    await other
    assert link.identify(accounts.keys[0]).key_id == "k0"


async def test_every_look_says_which_requests_are_still_answered_until_they_are_left() -> None:
    accounts, link = linked()
    claim = Claim(tenant="a", key="k", fingerprint=b"f", attempt="1", seconds=60.0)
    await link.claim(claim)
    for _ in range(2):
        await link.look()
        assert accounts.told[-1] == (-1 if len(accounts.told) == 2 else 0, "router-0", [(claim, False)])
    link.leave(claim)
    await link.look()
    assert accounts.told[-1] == (0, "router-0", [])


async def test_of_what_a_router_was_given_to_answer_a_new_book_can_learn_until_it_failed() -> None:
    accounts, link = linked()
    claim = Claim(tenant="a", key="k", fingerprint=b"f", attempt="1", seconds=60.0)
    for found, is_given in ((Standing.RUNNING, False), (Standing.YOURS, True)):
        accounts.claimed = found
        await link.claim(claim)
        await link.look()
        assert accounts.told[-1][-1] == [(claim, is_given)]  # type: ignore[index]
    await link.deliver(claim, ())
    await link.look()
    assert accounts.told[-1][-1] == [(claim, True)]  # type: ignore[index]
    await link.deliver(claim, None)
    await link.look()
    assert accounts.told[-1][-1] == [(claim, False)]  # type: ignore[index]
    link.leave(claim)
    await link.claim(claim)
    link.leave(claim)
    assert not link._given


async def test_accounts_that_were_away_are_told_what_was_answered_under_keys() -> None:
    """Another replica of them knows no answers: a repeat elsewhere would be computed, and billed, again."""
    accounts = AskedAccounts()
    handle: Any = accounts
    claim = Claim(tenant="a", key="k", fingerprint=b"f", attempt="1", seconds=60.0)
    answer = Answer(claim, 67.0, ({"type": "x"},), 400)
    link = AccountsClient(calls_of(handle), "router-0", grace_s=60.0, kept=lambda: [(answer, 7.0)] * 2)
    await link.look()
    accounts.does_answer = False
    await link.look()
    accounts.told.clear()
    for _ in range(2):  # once is enough
        accounts.does_answer = True
        await link.look()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # it tells beside
    delivered = [told for told in accounts.told if isinstance(told[0], Claim)]  # type: ignore[index]
    assert [told[1:] for told in delivered] == [("router-0", answer.messages)] * 2  # type: ignore[index]
    told: Claim = delivered[0][0]  # type: ignore[index]
    assert (told.tenant, told.key, told.fingerprint, told.seconds) == ("a", "k", b"f", 7.0)


async def test_a_look_tells_which_keys_are_no_longer_good() -> None:
    accounts = AskedAccounts()
    good: list[list[bool]] = []
    handle: Any = accounts
    link = AccountsClient(
        calls_of(handle), "router-0", grace_s=60.0, on_look=lambda is_good: good.append([is_good("k0"), is_good("k1")])
    )
    accounts.does_answer = False
    await link.look()
    accounts.does_answer = True
    accounts.keys += [new_key(), new_key()]
    await link.look()
    accounts.keys.pop()
    await link.look()
    accounts.does_answer = False
    await link.look()
    assert good == [[True, True], [True, True], [True, False], [True, False]], "who knows nothing ends nothing"
