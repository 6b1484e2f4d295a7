"""Reports of usage over HTTP: a tenant's own to any of its keys, all of them to administrators."""

from __future__ import annotations

import io
import sys

import httpx
import pyarrow.parquet
import pytest

from serve_app.core.ledger import Row, csv_of
from serve_app.tenants.store import Author
from tests.flow.test_admin import House, client, house  # noqa: F401

AT = 1.8e9


def record(house: House) -> None:  # noqa: F811
    rows = [
        Row(id=f"{tenant}/{number}", tenant=tenant, key_id="key", request_id="r", model="tiny", at=AT, cost=5 * 10**8)
        for tenant in ("acme", "=beta")
        for number in range(2)
    ]
    house.admin_service.ledger.record(rows, (), AT)


async def test_a_tenant_sees_its_own_whatever_it_asks(house: House, client: httpx.AsyncClient) -> None:  # noqa: F811
    record(house)
    key = house.key("acme")
    mine = await client.get("/v1/usage?by=tenant,day", headers=key)
    assert [(line["tenant"], line["requests"], line["cost"]) for line in mine.json()["data"]] == [("acme", 2, 1.0)]
    for query in ("tenant=beta", "by=secret", "since=yesterday", "until=2026-02-30", "format=orc"):
        assert (await client.get(f"/v1/usage?{query}", headers=key)).status_code == 400
    assert (await client.get("/v1/usage")).status_code == 401


async def test_csv_holds_no_formula(house: House) -> None:  # noqa: F811
    record(house)
    answer = house.admin_service.answer("show_usage", {"by": "tenant"}, Author(name="test", at=0.0))
    lines = csv_of(answer).splitlines()
    assert lines[0].startswith("tenant,requests,")
    assert [line.split(",")[0] for line in lines[1:]] == ["'=beta", "acme"]


@pytest.mark.parametrize("form", ["csv", "parquet"])
async def test_a_report_without_lines_has_the_columns_of_one_with(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    form: str,
) -> None:
    admin = {"authorization": f"Bearer {house.admin}"}

    async def told() -> list[tuple[str, str]]:
        answer = await client.get(f"/admin/usage?by=day,tenant&format={form}", headers=admin)
        if form == "csv":
            return [(name, "") for name in answer.text.splitlines()[0].split(",")]
        schema = pyarrow.parquet.read_schema(io.BytesIO(answer.content))
        return list(zip(schema.names, map(str, schema.types), strict=True))

    nothing = await told()
    record(house)
    assert await told() == nothing
    assert [name for name, _ in nothing][:3] == ["day", "tenant", "requests"]


async def test_parquet_says_what_json_says(house: House, client: httpx.AsyncClient) -> None:  # noqa: F811
    record(house)
    admin = {"authorization": f"Bearer {house.admin}"}
    for query in ("by=tenant,model,day", "by=tenant&since=2999-01-01"):
        told = (await client.get(f"/admin/usage?{query}", headers=admin)).json()["data"]
        answer = await client.get(f"/admin/usage?{query}&format=parquet", headers=admin)
        assert answer.headers["content-type"] == "application/vnd.apache.parquet"
        table = pyarrow.parquet.read_table(io.BytesIO(answer.content))
        assert table.to_pylist() == told
    assert {"int64", "double", "string"} == set(map(str, columns(await parquet(client, admin))))


async def parquet(asking: httpx.AsyncClient, admin: dict[str, str]) -> pyarrow.Table:
    answer = await asking.get("/admin/usage?format=parquet", headers=admin)
    return pyarrow.parquet.read_table(io.BytesIO(answer.content))


def columns(table: pyarrow.Table) -> list[object]:
    return list(table.schema.types)


async def test_without_its_library_parquet_is_refused_with_what_to_install(
    house: House,  # noqa: F811
    client: httpx.AsyncClient,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused = await client.get("/v1/usage?format=parquet", headers=house.key("acme"))
    assert refused.status_code == 400
    assert ".venv/bin/pip install -c constraints.txt -e '.[parquet]'" in refused.json()["error"]["message"]
