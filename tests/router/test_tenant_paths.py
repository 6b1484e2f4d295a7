"""What the way of a tenant's request computes quickly is what simple code computes."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

from serve_app.api.limits import DEFAULT_LIMITS
from serve_app.api.listings import LimitState
from serve_app.catalog.resolve import Wanted
from serve_app.core.cards import ModelCard
from serve_app.core.ledger import NANO_PER_TOKEN, Price
from serve_app.core.names import ModelRef
from serve_app.core.tenants import LOCAL, Amount, Meter, Scope, Tenant
from serve_app.http.exchange import duration, rate_headers
from serve_app.router.lower import lower
from serve_app.tenants.keys import Key
from tests.fakes import model_card
from tests.parsing import parse_completion

METERS = list(Meter)


def resolve(wanted: Wanted) -> ModelRef:
    return ModelRef(base=wanted.model)


def card_of(ref: ModelRef) -> ModelCard:
    return model_card(ref.base, vocab_size=100)


def test_a_tenants_requests_are_anybodys_with_its_share_its_salt_and_its_bound() -> None:
    tenants = [Tenant(name="acme", weight=3.0, priority="batch", max_tokens=7), Tenant(name="b", cache_group="both")]
    bodies = [{"max_tokens": 5}, {"cache_salt": "x", "n": 2}, {"prompt": ["a", "b"], "max_tokens": -1}]
    for tenant, body in itertools.product(tenants, bodies):
        sent = {"model": "tiny", "prompt": "Hello", "max_tokens": 7, "seed": 1, **body}
        request = parse_completion(json.dumps(sent).encode(), DEFAULT_LIMITS)
        anybodys = lower(request, "cmpl-1", resolve=resolve, card_of=card_of)
        own = f"group {tenant.cache_group}" if tenant.cache_group else f"tenant {tenant.own}"
        wanted = [
            replace(
                each,
                share=tenant.share,
                cache_salt=f"{own}\n{each.cache_salt}",
                stop=replace(each.stop, max_tokens=each.stop.max_tokens or tenant.max_tokens),
            )
            for each in anybodys
        ]
        assert list(lower(request, "cmpl-1", resolve=resolve, card_of=card_of, tenant=tenant)) == wanted
        assert {each.share for each in anybodys} == {LOCAL.tenant.share}


def test_a_cost_is_the_sum_of_what_each_kind_of_token_costs() -> None:
    chance = random.Random(1)
    for _ in range(500):
        cached = chance.choice([None, 0.0, chance.uniform(0, 9)])
        price = Price(
            prompt=chance.choice([0.0, chance.uniform(0, 20)]), cached=cached, completion=chance.uniform(0, 60)
        )
        prompt, completion = chance.randrange(10_000), chance.randrange(10_000)
        hits = chance.randint(0, prompt)
        each = [
            (prompt - hits, price.prompt),
            (hits, price.prompt if cached is None else cached),
            (completion, price.completion),
        ]
        wanted = sum(number * round(amount * NANO_PER_TOKEN) for number, amount in each)
        assert price.cost(prompt_tokens=prompt, cached_tokens=hits, completion_tokens=completion) == wanted


def test_an_amount_over_meters_is_what_it_is_on_each() -> None:
    chance = random.Random(2)
    for _ in range(100):
        amount = Amount(requests=chance.randrange(3), tokens=chance.randrange(99), cost=chance.randrange(99))
        meters = chance.sample(METERS, chance.randint(0, len(METERS)))
        told = {
            meter: amount.cost if "budget" in meter else amount.tokens if "token" in meter else amount.requests
            for meter in meters
        }
        assert amount.over(meters) == told


def test_headers_of_limits_are_those_of_their_names() -> None:
    chance = random.Random(3)
    for _ in range(100):
        rates = {
            meter: LimitState(
                limit=chance.randrange(10**6), remaining=chance.randrange(10**6), reset_s=chance.uniform(0, 99)
            )
            for meter in chance.sample([Meter.REQUESTS, Meter.TOKENS], chance.randint(0, 2))
        }
        names = {Meter.REQUESTS: "requests", Meter.TOKENS: "tokens"}
        wanted = []
        for meter, rate in rates.items():
            told = {"limit": str(rate.limit), "remaining": str(rate.remaining), "reset": duration(rate.reset_s)}
            wanted += [(f"x-ratelimit-{name}-{names[meter]}".encode(), told[name].encode()) for name in told]
        assert rate_headers(rates) == wanted


def test_a_key_is_valid_before_each_of_its_ends() -> None:
    ends: list[float | None] = [None, 1.0, 2.0, 3.0]
    for expires_at in ends:
        for revoked_at in ends:
            key = Key(
                id="k", tenant="t", digest="", scopes=frozenset(Scope), created_at=0.0,
                expires_at=expires_at, revoked_at=revoked_at,
            )  # fmt: skip
            for now in (0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 9.0):
                assert key.is_valid(now) is all(now < end for end in (expires_at, revoked_at) if end is not None)
