"""Files and batches as OpenAI's client uses them, through refusals, limits and kills of routers and Accounts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from sqlalchemy import select

from serve_app.core.batches import FILES_DAYS, LOST_S, BatchCard, BatchState, Kept, Line
from serve_app.core.errors import Unavailable
from serve_app.core.ledger import UNATTRIBUTED, UsageQuestion
from serve_app.http.metrics import batch_lines
from serve_app.router.batch_files import MAX_LINE_BYTES, STRAY_S, BatchFiles
from serve_app.router.batch_worker import SWEEP_S
from serve_app.tenants import tables
from serve_app.tenants.batch_work import EXPIRING_S
from serve_app.tenants.lending import DAY_S
from tests.fakes import settle
from tests.flow.batching import BatchHouse, Node, backend, created, jsonl, requests, sent
from tests.tenants.conftest import postgresql, url  # noqa: F401


@pytest.fixture
def house(tmp_path: Path) -> BatchHouse:
    return BatchHouse(tmp_path, f"sqlite:///{tmp_path / 'store.db'}")


@pytest.fixture
async def node(house: BatchHouse) -> AsyncIterator[Node]:
    made = Node(house, [backend()])
    yield made
    await made.kill()


async def lines_of(node: Node, file_id: str | None, tenant: str = "acme") -> list[dict[str, object]]:
    assert file_id is not None
    content = await node.client(tenant).files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_the_official_client_goes_a_batchs_whole_life(node: Node, house: BatchHouse) -> None:
    client = node.client()
    batch = await created(node, jsonl([*requests(20)]))
    assert (batch.status, batch.metadata) == ("validating", {"job": "nightly"})
    batch = await node.until(batch.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 20, 0)
    assert batch.error_file_id is None
    found = await lines_of(node, batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"own-{each}" for each in range(20)]
    assert {line["response"]["status_code"] for line in found} == {200}  # type: ignore[index]
    assert found[0]["response"]["body"]["usage"]["completion_tokens"] == 4  # type: ignore[index]
    assert (await client.batches.list()).data[0].id == batch.id
    assert {each.id for each in (await client.files.list()).data} == {batch.input_file_id, batch.output_file_id}
    usage = batch.model_dump()["usage"]
    assert (usage["output_tokens"], batch.model_dump()["cost"]) == (80, (1000 * usage["input_tokens"] + 160_000) / 1e9)
    await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.input_file_id)
    assert [each.name for each in house.folder.iterdir()] == [batch.output_file_id]


async def test_answers_are_as_they_are_described(node: Node) -> None:
    batch = await node.until((await created(node, jsonl(requests(2)))).id)
    client = httpx.AsyncClient(transport=node.transport, base_url="http://flow")
    headers = {"x-api-key": node.house.keys["acme"]}
    document = (await client.get("/openapi.json", headers=headers)).json()
    named = {"/v1/files/{id}": batch.output_file_id, "/v1/batches/{id}": batch.id, "/v1/files": "", "/v1/batches": ""}
    for path, own_id in named.items():
        answer = await client.get(path.replace("{id}", str(own_id)), headers=headers)
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        jsonschema.validate(answer.json(), {**content["schema"], "components": document["components"]})
    await client.aclose()


async def test_lines_wait_at_the_lowest_priority_and_never_fill_more_than_free_slots(house: BatchHouse) -> None:
    stepped = backend(slots=3, is_stepped=True)
    node = Node(house, [stepped])
    await created(node, jsonl(requests(9)))
    for _ in range(20):
        await node.tend()
    assert stepped.num_live == 3
    given = [each for submission in stepped.submissions for each in submission]
    assert {each.share.priority for each in given} == {"batch"}
    assert {each.share.flow for each in given} == {"acme"}
    await node.kill()


@pytest.mark.parametrize(
    ("line", "change", "code", "param"),
    [
        (2, {"custom_id": "own-0"}, "duplicate_custom_id", "custom_id"),
        (2, {"custom_id": 7}, "invalid_custom_id", "custom_id"),
        (1, {"method": "GET"}, "invalid_method", "method"),
        (1, {"url": "/v1/embeddings"}, "invalid_url", "url"),
        (1, {"body": "text"}, "invalid_body", "body"),
        (1, {"body": {"prompt": "a"}}, "missing_required_parameter", "body.model"),
        (3, {"body": {"model": "other", "prompt": "a"}}, "mismatched_model", "body.model"),
        (1, {"body": {"model": "tiny", "stream": True}}, "invalid_body", "body.stream"),
        (1, {"body": {"model": "m" * 513}}, "missing_required_parameter", "body.model"),
        (1, {"body": {"model": "\ud800"}}, "missing_required_parameter", "body.model"),
        (1, {"deep": functools.reduce(lambda inside, _: [inside], range(200), 0)}, "invalid_json_line", None),
    ],
)
async def test_an_input_that_is_wrong_is_refused_with_its_lines(
    node: Node, line: int, change: dict[str, object], code: str, param: str | None
) -> None:
    lines = requests(3)
    lines[line - 1] |= change
    batch = await node.until((await created(node, jsonl(lines))).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.line, error.code, error.param) == (line, code, param)


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"{\n", "invalid_json_line")]
)
async def test_an_input_without_requests_is_refused(node: Node, content: bytes, code: str) -> None:
    batch = await node.until((await created(node, content)).id)
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or ()] == [code]


async def test_a_line_that_its_route_refuses_is_in_the_error_file_alone(node: Node) -> None:
    lines = requests(3)
    lines[1]["body"] = {"model": "tiny", "prompt": "a", "max_tokens": -7}
    batch = await node.until((await created(node, jsonl(lines))).id)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 1)
    assert [line["custom_id"] for line in await lines_of(node, batch.output_file_id)] == ["own-0", "own-2"]
    [refused] = await lines_of(node, batch.error_file_id)
    assert refused["custom_id"] == "own-1"
    assert refused["response"]["status_code"] == 400  # type: ignore[index]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "a b"}),
        ("/v1/responses", {"input": "a b", "max_output_tokens": 2}),
    ],
)
async def test_every_endpoint_answers_in_its_own_shape(node: Node, endpoint: str, body: dict[str, object]) -> None:
    line = {"custom_id": "x", "method": "POST", "url": endpoint, "body": {"model": "tiny", **body}}
    batch = await node.until((await created(node, jsonl([line]), endpoint=endpoint)).id)
    found = await lines_of(node, batch.output_file_id or batch.error_file_id)
    assert found[0]["response"]["status_code"] == 200, found  # type: ignore[index]
    route = await node.client().post(endpoint.removeprefix("/v1"), body={**line["body"]}, cast_to=object)  # type: ignore[dict-item]
    assert found[0]["response"]["body"].keys() == route.keys()  # type: ignore[index, attr-defined]


async def test_a_cancelled_batch_keeps_what_was_computed_and_computes_no_more(house: BatchHouse) -> None:
    stepped = backend(slots=2, is_stepped=True)
    node = Node(house, [stepped])
    batch = await created(node, jsonl(requests(6)))
    while stepped.num_live < 2:
        await node.tend()
    cancelled = await node.client().batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    await node.tend()
    while stepped.num_live:
        stepped.step()
        await node.rest()
    batch = await node.until(batch.id)
    assert batch.status == "cancelled"
    done, left = await lines_of(node, batch.output_file_id), await lines_of(node, batch.error_file_id)
    assert (len(done), len(left)) == (2, 4)
    assert {line["error"]["code"] for line in left} == {"batch_cancelled"}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match="has ended"):
        await node.client().batches.cancel(batch.id)
    await node.kill()


async def test_a_batch_that_is_late_expires_with_what_it_has(house: BatchHouse) -> None:
    stepped = backend(slots=1, is_stepped=True)
    node = Node(house, [stepped])
    batch = await created(node, jsonl(requests(3)))
    while not stepped.num_live:
        await node.tend()
    house.now += 86_400
    await node.tend()
    while stepped.num_live:
        stepped.step()
        await node.rest()
    batch = await node.until(batch.id)
    assert batch.status == "expired"
    assert len(await lines_of(node, batch.output_file_id)) == 1
    assert {line["error"]["code"] for line in await lines_of(node, batch.error_file_id)} == {"batch_expired"}  # type: ignore[index]
    await node.kill()


async def test_what_belongs_to_another_tenant_is_not_there(node: Node) -> None:
    batch = await created(node, jsonl(requests(1)))
    other = node.client("beta")
    assert [(await other.files.list()).data, (await other.batches.list()).data] == [[], []]
    for asked in (
        other.files.retrieve(batch.input_file_id),
        other.files.content(batch.input_file_id),
        other.files.delete(batch.input_file_id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await asked


async def test_files_are_bounded_one_by_one_and_together(node: Node, house: BatchHouse) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await sent(node, b"x" * ((1 << 20) + 1))
    assert refused.value.status_code == 413
    await asyncio.gather(*(sent(node, b"x" * (1 << 20)) for _ in range(2)))
    with pytest.raises(openai.BadRequestError, match="max_files_bytes"):
        await sent(node, b"x")
    await sent(node, b"x", "beta")
    assert len(list(house.folder.iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_what_is_asked_wrongly_is_refused_by_name(node: Node, changes: dict[str, object], said: str) -> None:
    file_id = await sent(node, jsonl(requests(1)))
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h", **changes}
    with pytest.raises(openai.BadRequestError, match=said):
        await node.client().post("/batches", body=asked, cast_to=object)


async def test_a_folder_that_cannot_be_used_is_named_and_all_else_is_answered(node: Node, house: BatchHouse) -> None:
    house.folder.write_bytes(b"no folder")
    with pytest.raises(openai.InternalServerError, match="`files`") as refused:
        await sent(node, b"x")
    assert refused.value.status_code == 503
    assert (await node.client().completions.create(model="tiny", prompt="a", max_tokens=1)).choices
    house.now += SWEEP_S
    await node.tend()


def test_neither_a_line_without_an_end_is_read_whole_nor_half_a_file_kept(tmp_path: Path) -> None:
    files = BatchFiles(tmp_path)
    file_id, _ = files.write(io.BytesIO(b" " * (MAX_LINE_BYTES + 1)))
    card = BatchCard(
        id="b", tenant="t", key_id="k", state=BatchState.VALIDATING, outcome=BatchState.COMPLETED, num_left=0,
        endpoint="/v1/completions", model="", input_file=file_id,
    )  # fmt: skip
    assert [each.code for each in files.check(card).errors] == ["line_too_long"]

    def pages() -> Iterator[list[Kept]]:
        yield [Kept(line=Line(batch="b", number=1, offset=0, length=1), status=200, text="{}")]
        raise Unavailable("nobody answers")

    with pytest.raises(Unavailable):
        files.finish(card, pages())
    assert [each.name for each in tmp_path.iterdir()] == [file_id]


async def test_files_of_a_batch_expire_as_it_was_asked(node: Node) -> None:
    file_id, client = await sent(node, jsonl(requests(1))), node.client()
    expires = {"anchor": "created_at", "seconds": 7200}
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "1h"}
    made = await client.post("/batches", body={**asked, "output_expires_after": expires}, cast_to=openai.types.Batch)
    output = await client.files.retrieve(str((await node.until(made.id)).output_file_id))
    assert output.expires_at == output.created_at + 7200
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-none'"):
        await client.files.retrieve("file-none")


async def test_a_router_counts_lines_that_are_left_that_run_and_that_ended(house: BatchHouse) -> None:
    stepped = backend(slots=2, is_stepped=True)
    node = Node(house, [stepped])
    lines = requests(6)
    lines[0]["body"] = {"model": "tiny", "prompt": "a", "max_tokens": -7}
    batch = await created(node, jsonl(lines))
    while (told := numbers(node)) != {"left": 5, "running": 2, "completed": 0, "failed": 1}:
        assert told["left"] in (0, 6, 5), told
        await node.tend()
    while stepped.num_live or numbers(node)["left"]:
        stepped.step()
        await node.tend()
    assert numbers(node) == {"left": 0, "running": 0, "completed": 5, "failed": 1}
    assert (await node.until(batch.id)).status == "completed"
    await node.kill()


def numbers(node: Node) -> dict[str, float]:
    """The samples of /metrics about lines of batches."""
    return {values[0]: number for family in batch_lines(node.worker.tally) for values, number in family.samples}


async def test_files_are_kept_for_so_many_days_and_ended_batches_as_long_after_their_window(
    node: Node, house: BatchHouse
) -> None:
    client = node.client()
    ended = await node.until((await created(node, jsonl(requests(1)))).id)
    file = await client.files.retrieve(str(ended.output_file_id))
    assert file.expires_at == file.created_at + FILES_DAYS * DAY_S
    house.now = float(ended.expires_at or 0) + FILES_DAYS * DAY_S - EXPIRING_S
    later = await created(node, jsonl(requests(1)))
    await node.tend()
    assert {each.id async for each in client.batches.list()} == {ended.id, later.id}
    assert str(ended.output_file_id) not in {each.id async for each in client.files.list()}
    house.now += 3 * EXPIRING_S
    await node.tend()
    assert [each.id async for each in client.batches.list()] == [later.id]


async def test_a_worker_that_is_closed_begins_no_line(house: BatchHouse) -> None:
    stepped = backend(slots=2, is_stepped=True)
    node = Node(house, [stepped])
    await created(node, jsonl(requests(9)))
    while not (stepped.num_live == 2 and node.worker._ready):
        await node.tend()
    await node.worker.close()
    await settle()
    assert (node.worker.num_at_work, node.worker._tasks) == (0, {})
    await node.kill()


async def test_pages_of_a_list_hold_everything_once(node: Node) -> None:
    ids = [await sent(node, b"x") for _ in range(5)]
    found = [each.id async for each in node.client().files.list(limit=2, order="asc")]
    assert sorted(found) == sorted(ids)


async def test_a_file_that_an_open_batch_reads_stays(node: Node) -> None:
    batch = await created(node, jsonl(requests(1)))
    with pytest.raises(openai.BadRequestError, match=batch.id):
        await node.client().files.delete(batch.input_file_id)


async def test_what_is_nobodys_in_the_folder_is_removed_after_a_while(node: Node, house: BatchHouse) -> None:
    kept = await sent(node, b"x")
    theirs = await sent(node, b"x", "beta")
    (house.folder / "file-orphan").write_bytes(b"of a router that died")
    house.admin_service.answer("remove_tenant", {"name": "beta"}, house.by())
    for seconds in (SWEEP_S, STRAY_S / 2):
        house.now += seconds
        await node.tend()
        assert {each.name for each in house.folder.iterdir()} == {kept, theirs, "file-orphan"}
    house.now += STRAY_S
    await node.tend()
    assert [each.name for each in house.folder.iterdir()] == [kept]


def rows_of(house: BatchHouse) -> Counter[str]:
    with house.store.engine.connect() as connection:
        rows = connection.execute(select(tables.rows.c.request_id)).scalars()
        return Counter(rows)


@pytest.mark.law("Exactly once")
@pytest.mark.parametrize("seed", range(3))
async def test_each_line_has_one_result_and_one_row_whatever_dies_and_whatever_call_is_lost(
    tmp_path: Path,
    url: str,  # noqa: F811
    seed: int,
) -> None:
    """Routers die with all that they hold, Accounts with all that they know, calls before or after they are done."""
    play = random.Random(seed)
    house = BatchHouse(tmp_path, url, luck=play)
    backends = [backend(number, slots=6, is_stepped=True) for number in range(2)]
    nodes = [Node(house, backends, f"router-{number}") for number in range(2)]
    house.luck = None
    batch = await created(nodes[0], jsonl(requests(100)))
    house.luck = play
    for step in range(3000):
        at = play.randrange(2)
        with contextlib.suppress(Unavailable):
            await nodes[at].tend()
        for each in backends:
            each.step()
        if play.random() < 0.03:
            await nodes[at].kill()
            nodes[at] = Node(house, backends, f"router-{step}")
        if play.random() < 0.03:
            house.restart()
        if (await nodes[at].client().batches.retrieve(batch.id)).status == "completed":
            break
    batch = await nodes[0].client().batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 100)  # type: ignore[union-attr]
    found = await lines_of(nodes[0], batch.output_file_id)
    assert [line["custom_id"] for line in found] == [f"own-{each}" for each in range(100)]
    house.luck = None
    for each in nodes:
        await each.kill()
        await each.accounting.ledger_writer.flush()
    assert rows_of(house) == Counter(str(line["id"]) for line in found), "each line has one row"
    usage = house.admin_service.ledger.usage(UsageQuestion(by=("tenant", "key_id")))
    sums = {line.by["key_id"] == UNATTRIBUTED: line.sums for line in usage}
    answered = [line["response"]["body"]["usage"]["completion_tokens"] for line in found]  # type: ignore[index]
    assert sums[False]["completion_tokens"] == sum(answered)
    assert batch.model_dump()["cost"] == sums[False]["cost"] / 1e9
    house.store.close()


async def test_a_router_that_fell_silent_loses_its_lines_to_others(house: BatchHouse) -> None:
    stepped = backend(slots=4, is_stepped=True)
    silent, other = Node(house, [stepped], "silent"), Node(house, [backend(1)], "other")
    batch = await created(silent, jsonl(requests(4)))
    while stepped.num_live < 4:
        await silent.tend()
    house.now += LOST_S - 1
    await other.tend()
    await other.tend()
    batch = await other.until(batch.id)
    assert batch.status == "completed"
    while stepped.num_live:
        stepped.step()
        await silent.rest()
    await silent.tend()
    assert sum(rows_of(house).values()) == 4, "what comes late is dropped"
    await silent.kill()
    await other.kill()
