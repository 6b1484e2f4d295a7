"""A grid has a row for each cell; killed anywhere and called again, it has the same rows and asks for the rest only."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy
import pandas
import pytest
from IPython.core.interactiveshell import InteractiveShell
from pandas.testing import assert_frame_equal
from sqlalchemy import create_engine

from serve_app.core.cards import EmbeddingForm, RecordCard
from serve_app.core.ledger import UsageQuestion
from serve_app.core.request import GenerationRequest
from serve_app.http.app import build_app
from serve_app.lab.client import Background, Client
from serve_app.lab.errors import ServiceError
from serve_app.lab.grid import Kept, side_by_side
from serve_app.lab.magics import MalformedLine, load_ipython_extension
from serve_app.lab.wire import NUM_PATIENT_RETRIES
from serve_app.router.fleet import Fleet
from serve_app.router.router import Router
from serve_app.tenants.ledger import LedgerStore
from serve_app.tenants.lending import Lending
from tests.fakes import HIDDEN_SIZE, FakeBackend, adapter_card, model_card, prompt_words, replica_card
from tests.flow.bookkeeping import TENANTS, FakeAccounts, House, backend, flushed, house

MODELS = ["tiny", "tiny:pirate", "tiny:shout"]
OF_THE_RUN = ["seconds", "cached_tokens"]
"""Columns that tell of one run alone."""
TOO_LONG = "This prompt is too long."
COMPLETIONS = "/v1/completions"
REFUSED = {"error": {"message": "Come again.", "code": "rate_limit_exceeded"}}


def script(request: GenerationRequest, sample: int) -> list[str]:
    """Words that name all that a cell is made of."""
    name, seed = request.model.adapter or "base", request.sampling.seed
    return [f" {name}", *[f" {word.strip()}{seed % 1000}" for word in prompt_words(request)]]


@dataclass
class Counting(httpx2.AsyncBaseTransport):
    """Counts what is asked at each path; refuses some of it, and one prompt always.

    to_refuse:  of the path `refused`, so many from now on are told to come again
    num_absent: completions from now on that a proxy answers in place of the service, which begins or ends
    num_served: completions after which the key is good for nothing
    """

    app: httpx2.ASGITransport
    asked: Counter[str] = field(default_factory=Counter)
    to_refuse: int = 0
    refused: str = COMPLETIONS
    num_absent: int = 0
    num_served: int | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path == COMPLETIONS and self.asked[path] == self.num_served:
            return httpx2.Response(401, json={"error": {"message": "This key is no longer good."}}, request=request)
        self.asked[path] += 1
        if path == COMPLETIONS and TOO_LONG.encode() in request.content:
            return httpx2.Response(400, json={"error": {"message": "It is beyond the context."}}, request=request)
        if path == COMPLETIONS and self.num_absent:
            self.num_absent -= 1
            return httpx2.Response(404, text="Path '/v1/completions' not found.", request=request)
        if path == self.refused and self.to_refuse:
            self.to_refuse -= 1
            return httpx2.Response(429, json=REFUSED, headers={"retry-after-ms": "1"}, request=request)
        return await self.app.handle_async_request(request)


@dataclass(frozen=True)
class Town:
    client: Client
    counting: Counting


@pytest.fixture(scope="module")
def town() -> Iterator[Town]:
    background, fleet = Background(), Fleet("router-0")
    records = RecordCard(returns_hidden_states=True, embedding=EmbeddingForm(), hidden_size=HIDDEN_SIZE)
    card = replace(model_card("tiny", adapter_card("pirate"), adapter_card("shout")), records=records)
    recited = FakeBackend(replica_card("r0", card), script=script)

    async def opened() -> httpx2.ASGITransport:
        fleet.put(recited.card, recited)
        return httpx2.ASGITransport(app=build_app(Router(fleet)))

    counting = Counting(background.run(opened()))
    client = Client("http://flow", http_client=httpx2.AsyncClient(transport=counting), background=background)
    yield Town(client, counting)
    background.run(fleet.close())
    client.close()


@pytest.fixture
def client(town: Town) -> Client:
    town.counting.asked.clear()
    town.counting.to_refuse, town.counting.refused, town.counting.num_served = 0, COMPLETIONS, None
    return town.client


@pytest.fixture
def counting(town: Town, client: Client) -> Counting:
    return town.counting


def told(frame: pandas.DataFrame) -> pandas.DataFrame:
    """What every run of a grid says alike."""
    return frame.drop(columns=OF_THE_RUN)


def test_each_prompt_is_completed_by_each_model_with_each_set_of_parameters(client: Client) -> None:
    sets = [{"temperature": 0.5, "logprobs": 1}, {"temperature": 0, "stop": ["x"]}]
    frame = client.grid(["a", "b c", "a"], MODELS[:2], sets)
    assert list(frame.columns)[:6] == ["prompt", "model", "seed", "temperature", "logprobs", "stop"]
    asked = [(0.5, "tiny"), (0.5, "tiny:pirate"), (0, "tiny"), (0, "tiny:pirate")]
    rows = list(frame[["temperature", "model", "prompt"]].itertuples(index=False, name=None))
    assert rows == [(*each, prompt) for each in asked for prompt in ("a", "b c")]
    for row in frame.itertuples():
        name = row.model.partition(":")[2] or "base"
        assert row.text == f" {name}" + "".join(f" {word}{row.seed % 1000}" for word in row.prompt.split())
    assert frame["logprob"].notna().tolist() == [True] * 4 + [False] * 4
    assert frame["error"].isna().all()
    assert frame.index.is_unique


def test_models_draw_with_the_same_seed_and_prompts_with_their_own(client: Client) -> None:
    seeds = client.grid(["a", "b"], MODELS).groupby("prompt")["seed"].agg(["nunique", "first"])
    assert list(seeds["nunique"]) == [1, 1]
    assert seeds["first"].nunique() == 2
    assert set(client.grid(["a", "b"], MODELS, [{"seed": 5}, {"seed": 6}])["seed"]) == {5, 6}


@pytest.mark.parametrize("num_prompts", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_grid_that_was_killed_goes_on_and_has_the_frame_of_an_undisturbed_one(
    client: Client, counting: Counting, tmp_path: Path, num_prompts: int
) -> None:
    prompts = [f"prompt {number}" for number in range(num_prompts)]
    undisturbed = client.grid(prompts, MODELS)
    lines, parquet = tmp_path / "grid.parquet.jsonl", tmp_path / "grid.parquet"
    counting.num_served = counting.asked[COMPLETIONS] + 2 * num_prompts
    with pytest.raises(ServiceError, match="no longer good"):
        client.grid(prompts, MODELS, path=parquet)
    kept = lines.read_bytes()
    lines.write_bytes(kept[:-20])  # a line is written by half when the process is killed
    missing = 3 * num_prompts - (kept.count(b"\n") - 1)
    assert num_prompts <= missing < 3 * num_prompts
    counting.asked.clear()
    counting.num_served = None
    again = client.grid(prompts, MODELS, path=parquet)
    assert counting.asked[COMPLETIONS] == missing
    assert_frame_equal(told(again), told(undisturbed))
    assert_frame_equal(pandas.read_parquet(parquet), again)
    assert_frame_equal(client.grid(prompts, MODELS, path=lines), again)
    assert counting.asked[COMPLETIONS] == missing, "all is in the file"


@pytest.mark.parametrize("content", ["prompt,model\n", "{}", '{"id": "a"}\nnothing\n', "[1]\n"])
def test_a_file_that_is_no_grids_is_left_as_it_is(client: Client, tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match='"path" must name the file of a grid'):
        client.grid("a", MODELS, path=path)
    assert path.read_text() == content


def test_a_file_has_one_grid_at_a_time(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with closing(Kept(path)), pytest.raises(ValueError, match="no file that another grid writes now"):
        client.grid("a", MODELS, path=path)
    assert len(client.grid("a", MODELS, path=path)) == len(MODELS)


def test_what_is_refused_for_the_moment_comes_again_more_often_than_of_one_call(
    client: Client, counting: Counting
) -> None:
    counting.to_refuse = NUM_PATIENT_RETRIES
    frame = client.grid("a", "tiny")
    assert list(frame["text"].str.startswith(" base")) == [True]
    assert counting.asked[COMPLETIONS] == NUM_PATIENT_RETRIES + 1


def test_a_grid_waits_for_a_service_whose_proxy_knows_no_router(client: Client, counting: Counting) -> None:
    counting.num_absent = 2
    assert client.grid("a", "tiny")["error"].isna().all()
    assert counting.asked[COMPLETIONS] == 3
    counting.num_absent = 1
    with pytest.raises(ServiceError, match="No service can be reached"):
        client.complete("a", "tiny")


def test_a_cell_that_is_refused_has_the_error_and_is_asked_again_the_next_time(
    client: Client, counting: Counting, tmp_path: Path
) -> None:
    path = tmp_path / "grid.jsonl"
    for _ in range(2):
        frame = client.grid(["a", TOO_LONG], "tiny", path=path)
        assert list(frame["text"].isna()) == [False, True]
        assert frame["error"].iloc[1] == "It is beyond the context."
    assert counting.asked[COMPLETIONS] == 3
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["a"]


@pytest.mark.parametrize(
    ("params", "match"), [({"n": 2}, "several seeds"), ({"text": 1}, "text"), ({"seed": "x"}, "seed")]
)
def test_parameters_that_no_cell_may_have_are_refused_before_anything_is_computed(
    client: Client, counting: Counting, params: dict[str, object], match: str
) -> None:
    with pytest.raises((ValueError, ServiceError), match=match):
        client.grid(["a", "b"], MODELS, params)
    assert counting.asked[COMPLETIONS] == 0


def test_no_more_requests_are_out_at_once_than_was_said() -> None:
    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return item

    async def done() -> list[int]:
        return [each async for each in side_by_side(range(20), work, 3)]

    running = most = 0
    assert sorted(asyncio.run(done())) == list(range(20))
    assert most == 3


def test_costs_are_those_of_the_ledger_and_at_most_what_was_told_before(tmp_path: Path) -> None:
    store = LedgerStore(create_engine(f"sqlite:///{tmp_path / 'ledger.db'}"))
    accounts = FakeAccounts(store, Lending(lambda name: TENANTS[name].limits, clock=lambda: 0.0, wall=lambda: 0.0))
    background = Background()

    async def opened() -> House:
        return house(accounts, [backend(0)])

    one = background.run(opened())
    client = Client("http://flow", "beta", http_client=one.client, background=background)
    asked = (["a b c", "d"], MODELS[:2], [{"max_tokens": 5}, {"max_tokens": 7}])
    before, frame = client.grid_cost(*asked), client.grid(*asked)
    background.run(flushed(one, is_sure=True))
    sums = {line.by["adapter"]: line.sums["cost"] for line in store.usage(UsageQuestion(by=("adapter",)))}
    spent = frame.groupby("model")["cost"].sum()
    assert {name.partition(":")[2]: round(cost * 1e9) for name, cost in spent.items()} == sums
    assert sum(sums.values()) > 0
    assert list(before["completions"]) == [2] * 4
    assert list(before["completion_tokens_at_most"]) == [10, 14, 10, 14]
    assert before["cost_at_most"].sum() >= frame["cost"].sum()
    background.run(one.kill())
    client.close()


def test_numbers_and_columns_of_numpy_and_pandas_are_sent_as_pythons_own(client: Client) -> None:
    prompts, seeds = pandas.Series(["a", "b c"]), numpy.arange(2)
    frame = client.grid(prompts, numpy.array(MODELS), [{"seed": each, "max_tokens": numpy.int64(4)} for each in seeds])
    own = client.grid(list(prompts), MODELS, [{"seed": each, "max_tokens": 4} for each in range(2)])
    assert_frame_equal(told(frame), told(own))
    banned = {numpy.int64(5): numpy.float32(-1.0)}
    for given in (prompts, prompts.to_numpy()):
        assert len(client.complete(given, "tiny", logit_bias=banned, stop_token_ids=numpy.array([7]))) == 2


@pytest.mark.parametrize("wrong", [None, float("nan"), 5, [5, 6]])
def test_what_is_no_text_is_named_before_anything_is_computed(
    client: Client, counting: Counting, wrong: object
) -> None:
    prompts: list[Any] = ["a", wrong]
    for ask in (
        partial(client.grid, prompts, MODELS),
        partial(client.grid_cost, prompts, MODELS),
        partial(client.score, prompts, [" b", " c"], "tiny"),
        partial(client.evaluate, [{"prompt": each} for each in prompts], len, MODELS),
    ):
        with pytest.raises(ValueError, match=r'"prompts\[1\]" must be a text'):
            ask()
    with pytest.raises(ValueError, match=r'"texts\[0\]" must be a text that UTF-8 can hold'):
        client.perplexity("\ud800", "tiny")
    with pytest.raises(ValueError, match='"text" must be one text'):
        client.hidden_states(prompts, "tiny")  # type: ignore[arg-type]
    assert not counting.asked


def test_a_prompt_that_is_refused_costs_its_own_row_alone_if_it_is_the_first_one_too(client: Client) -> None:
    frame = client.grid(["", "a"], "tiny")
    assert list(frame["error"].isna()) == [False, True]


def test_a_question_that_changes_nothing_comes_again_when_the_service_says(client: Client, counting: Counting) -> None:
    counting.to_refuse, counting.refused = NUM_PATIENT_RETRIES, "/v1/embeddings"
    assert client.embed("a", "tiny").shape == (1, HIDDEN_SIZE)
    assert counting.asked["/v1/embeddings"] == NUM_PATIENT_RETRIES + 1


def test_a_cell_of_prompts_is_a_grid(client: Client) -> None:
    shell = InteractiveShell()
    load_ipython_extension(shell)
    shell.user_ns["client"] = client
    frame = shell.run_cell_magic("grid", "tiny tiny:pirate --max-tokens 4", "a\n\nb c\n")
    assert_frame_equal(told(frame), told(client.grid(["a", "b c"], MODELS[:2], {"max_tokens": 4})))
    with pytest.raises(MalformedLine, match="a model or more"):
        shell.run_cell_magic("grid", "--max-tokens 4", "a\n")


def test_a_continuation_has_the_log_probabilities_of_its_own_tokens(client: Client) -> None:
    """The fake's tokens are words with the blank before them, each with -1.25; one of them begins in a prompt."""
    scored = client.score(["a b", "a b", "a"], [" c d", "c d", ""], "tiny")
    assert list(scored["tokens"]) == [2, 2, 0]
    assert list(scored["logprob"]) == [-2.5, -2.5, 0.0]
    assert list(client.score("a", [" b", " b c"], "tiny")["tokens"]) == [1, 2]
    assert list(client.perplexity(["a b c"], "tiny")["perplexity"]) == [pytest.approx(numpy.exp(1.25))]
    with pytest.raises(ValueError, match='"prompts" must be one text, or 2'):
        client.score(["a"], ["b", "c"], "tiny")


def test_embeddings_and_hidden_states_are_arrays(client: Client, counting: Counting) -> None:
    assert client.embed([f"text {number}" for number in range(300)], "tiny").shape == (300, HIDDEN_SIZE)
    assert counting.asked["/v1/embeddings"] == 2
    states = client.hidden_states("a b", "tiny")
    assert (states.shape, states.dtype) == ((1, HIDDEN_SIZE), numpy.float32)
