"""Tenants as they are written down."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import get_args

import pytest

from serve_app.api.schemas import LIMITS, TENANT
from serve_app.core.shares import Priority
from serve_app.core.tenants import Limits, Rights, Tenant
from serve_app.tenants.declaration import FIELDS, changed, tenant_from, told_of
from serve_app.tenants.errors import TenancyError


def test_what_is_told_of_a_tenant_is_read_as_the_same_tenant() -> None:
    dice = random.Random(3)
    for _ in range(300):
        limits = {each.name: dice.choice([None, dice.randrange(1, 10**9)]) for each in fields(Limits)}
        tenant = Tenant(
            name=f"t{dice.randrange(100)}",
            weight=dice.uniform(0.01, 10),
            priority=dice.choice(get_args(Priority)),
            rights=Rights(tuple(dice.sample(["*", "a", "a:b", "a:*", "c*"], k=dice.randrange(4)))),
            limits=Limits(**limits),
            max_n=dice.choice([None, 3]),
            max_tokens=dice.choice([None, 40]),
            cors_origins=tuple(dice.sample(["*", "https://a.example", "http://b:8"], k=dice.randrange(3))),
            cache_group=dice.choice([None, "lab"]),
            log_texts=dice.choice([0.0, 0.25, 1.0]),
            resumes=dice.choice([True, False]),
        )
        assert tenant_from(told_of(tenant)) == tenant


def test_the_description_for_clients_has_the_same_fields() -> None:
    assert {"name", *TENANT} == set(FIELDS)
    assert set(LIMITS) == {each.name for each in fields(Limits)}
    assert set(told_of(Tenant(name="a"))) == set(FIELDS)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ([], "a tenant must be a mapping"),
        ({}, "A tenant needs a name"),
        ({"name": "a b"}, "name must"),
        ({"name": ""}, "name must"),
        ({"name": "a\n"}, "name must"),
        ({"name": 5}, "name must"),
        ({"name": "a", "modells": ["*"]}, "'modells' is no field"),
        ({"name": "a", "models": "*"}, "models must"),
        ({"name": "a", "models": ["a:b:c"]}, "models must"),
        ({"name": "a", "models": [""]}, "models must"),
        ({"name": "a", "models": ["a"] * 257}, "models must"),
        ({"name": "a", "weight": 0}, "weight must"),
        ({"name": "a", "weight": 1e-12}, "weight must be a number from 0.001 to 1000"),
        ({"name": "a", "limits": {"budget_per_day": 1e-12}}, "budget_per_day must be a number from 1e-09 to 1e"),
        ({"name": "a", "weight": True}, "weight must"),
        ({"name": "a", "weight": float("inf")}, "weight must"),
        ({"name": "a", "weight": float("nan")}, "weight must"),
        ({"name": "a", "weight": 10**400}, "weight must"),
        ({"name": "a", "priority": "urgent"}, "priority must"),
        ({"name": "a", "priority": []}, "priority must"),
        ({"name": "a", "max_n": 0}, "max_n must"),
        ({"name": "a", "max_tokens": 1.5}, "max_tokens must"),
        ({"name": "a", "limits": {"requests_per_minute": 0}}, "requests_per_minute must"),
        ({"name": "a", "limits": {"rpm": 1}}, "'rpm' is no field of limits"),
        ({"name": "a", "limits": 5}, "limits must"),
        ({"name": "a", "limits": {"budget_per_day": -1}}, "budget_per_day must"),
        ({"name": "a", "cors_origins": ["https://a/b"]}, "cors_origins must"),
        ({"name": "a", "cors_origins": ["https://*.a"]}, "cors_origins must"),
        ({"name": "a", "cache_group": "a b"}, "cache_group must"),
        ({"name": "a", "log_texts": 1.1}, "log_texts must"),
        ({"name": "a", "resumes": 1}, "resumes must be true or false"),
        ({"name": "a", "log_texts": -0.1}, "log_texts must"),
        ({"name": "a", "log_texts": True}, "log_texts must"),
        ({"name": "a", "log_texts": float("nan")}, "log_texts must"),
    ],
)
def test_what_is_no_tenant_is_refused_by_name(declared: object, named: str) -> None:
    with pytest.raises(TenancyError, match=f"^{named}"):
        tenant_from(declared)


def test_a_refusal_shows_no_more_than_so_much_of_what_it_refuses() -> None:
    with pytest.raises(TenancyError) as refusal:
        tenant_from({"name": "x" * 10_000})
    assert len(str(refusal.value)) < 300


def test_a_change_is_of_what_it_says_and_nothing_else() -> None:
    tenant = tenant_from({"name": "a", "max_n": 3, "limits": {"max_in_flight": 5, "tokens_per_minute": 9}})
    found = changed(tenant, {"weight": 2, "limits": {"max_in_flight": None}})
    assert (found.weight, found.max_n, found.limits) == (2.0, 3, Limits(tokens_per_minute=9))
    with pytest.raises(TenancyError, match="name cannot be changed"):
        changed(tenant, {"name": "b"})
    for nonsense in ([], {"limits": 7}, {"limits": []}):
        with pytest.raises(TenancyError):
            changed(tenant, nonsense)
