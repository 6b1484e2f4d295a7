"""The notebook kit against the whole house: what a notebook shows is what the service answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy
import pandas
import pytest
from IPython.core.interactiveshell import InteractiveShell
from pandas.testing import assert_frame_equal

from serve_app.lab.client import Background, Client
from serve_app.lab.errors import ServiceError
from serve_app.lab.magics import load_ipython_extension
from tests.flow.stack import running_stack

pytestmark = pytest.mark.slow
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Of a service that runs in the client's own loop."""
    background = Background()
    entered = running_stack(num_replicas=1, return_hidden_states=True)
    stack = background.run(entered.__aenter__())
    transport = httpx2.ASGITransport(app=stack.app)
    made = Client("http://flow", http_client=httpx2.AsyncClient(transport=transport), background=background)
    yield made
    background.run(entered.__aexit__(None, None, None))
    made.close()


def test_tokens_add_up_to_the_text(client: Client) -> None:
    (one,) = client.complete(PROMPT, max_tokens=8, temperature=0, logprobs=2)
    assert "".join(token.text for token in one.tokens) == one.text
    assert all(token.text in token.alternatives for token in one.tokens)
    assert list(one.frame()["logprob"]) == [token.logprob for token in one.tokens]


def test_a_stream_a_plain_answer_and_an_awaited_one_are_alike(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = {"max_tokens": 12, "seed": 3, "logprobs": 1}
    plain = client.complete(PROMPT, "demo", **ask)[0]
    streamed = client.stream(PROMPT, "demo", **ask)
    assert streamed == plain
    assert capsys.readouterr().out == plain.text + "\n"

    async def awaited() -> str:
        return (await client.acomplete(PROMPT, "demo", **ask)).text

    assert asyncio.run(awaited()) == plain.text


async def test_a_plain_call_works_where_a_loop_runs(client: Client) -> None:
    assert client.complete(PROMPT, "demo", max_tokens=2).text


def test_a_batch_with_a_bar_is_what_each_of_it_is_alone(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"Story {number}: the" for number in range(9)]
    batch = client.complete(prompts, "demo", max_tokens=4, temperature=0, n=2)
    alone = [client.complete(prompt, "demo", max_tokens=4, temperature=0).text for prompt in prompts]
    assert [each.text for each in batch] == [text for text in alone for _ in range(2)]
    assert [each.prompt for each in batch] == [prompt for prompt in prompts for _ in range(2)]
    assert batch.usage["completion_tokens"] <= 72
    assert capsys.readouterr().out.startswith("18 completions · ")


def test_a_comparison_has_each_models_own_text_in_its_column(client: Client) -> None:
    models = ["demo", "demo:pirate", "demo:shout"]
    table = client.compare([PROMPT, "The owl"], models, max_tokens=8, temperature=0)
    for model in models:
        alone = client.complete([PROMPT, "The owl"], model, max_tokens=8, temperature=0)
        assert list(table.frame()[model]) == [each.text for each in alone]
    assert len({text[: table.first_difference() + 1] for text in table.frame().iloc[0]}) > 1


def test_more_prompts_than_a_request_may_have_are_compared_in_the_order_of_one_request(client: Client) -> None:
    prompts = [f"Story {number}" for number in range(258)]
    table = client.compare(prompts, ["demo", "demo:pirate"], max_tokens=1, temperature=0).frame()
    assert list(table.index) == prompts
    for model in table:
        assert list(table[model].iloc[-2:]) == [
            client.complete(each, model, max_tokens=1, temperature=0).text for each in prompts[-2:]
        ]

    async def awaited() -> list[str]:
        return [each.text for each in await client.acomplete(prompts, "demo", max_tokens=1, temperature=0)]

    assert asyncio.run(awaited()) == list(table["demo"])


def test_one_model_may_be_compared_by_its_name(client: Client) -> None:
    assert client.compare(PROMPT, "demo", max_tokens=1).models == ("demo",)


def test_a_chat_is_answered_plainly_and_in_view(client: Client) -> None:
    question = "What is the capital of France?"
    answer = client.chat(question, temperature=0, logprobs=True, top_logprobs=2)
    assert answer.text == "The capital of France is Paris."
    assert len(answer[0].tokens) > 5
    streamed = client.stream([{"role": "user", "content": question}], temperature=0)
    assert streamed.text == answer.text


def test_calls_of_tools_are_read_alike_plainly_and_in_view(client: Client) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {**schema, "additionalProperties": False}},
    }
    ask = {"tools": [tool], "tool_choice": "required", "temperature": 0, "max_tokens": 48}
    messages = [{"role": "user", "content": "Weather?"}]
    plain, streamed = client.chat(messages, "demo", **ask)[0], client.stream(messages, "demo", **ask)
    assert [call["function"] for call in plain.tool_calls] == [call["function"] for call in streamed.tool_calls]
    assert plain.tool_calls[0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("ask", "param", "status"),
    [
        ({"temperature": 3}, "temperature", 400),
        ({"model": "nobody"}, "model", 404),
        ({"max_tokens": -5}, "max_tokens", 400),
    ],
)
def test_a_refusal_names_the_parameter_and_what_is_allowed(
    client: Client, ask: dict[str, object], param: str, status: int
) -> None:
    with pytest.raises(ServiceError) as caught:
        client.complete(PROMPT, **ask)  # type: ignore[arg-type]
    error = caught.value
    assert (error.param, error.status) == (param, status)
    assert error.allowed is not None
    assert error.found is not None


def test_a_refusal_of_a_batch_with_a_bar_reads_the_same(client: Client) -> None:
    with pytest.raises(ServiceError) as caught:
        client.complete(["x"] * 9, "demo", top_p=2)
    assert (caught.value.param, caught.value.code) == ("top_p", "invalid_value")


def test_where_nothing_listens_the_error_says_what_to_do() -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(ServiceError, match="serve_app up"):
        client.models()
    client.close()


def test_what_was_ignored_who_answered_and_which_seed_was_drawn_is_told(client: Client) -> None:
    answer = client.complete(PROMPT, "demo", max_tokens=4, nobodys_own=1)
    assert answer.told["served"] == "demo"
    assert answer.told["ignored"] == "nobodys_own"
    assert "nobodys_own" in answer._repr_html_()
    again = client.complete(PROMPT, "demo", max_tokens=4, seed=int(answer.told["seed"]))
    assert again.text == answer.text


def test_models_replicas_tokens_and_metrics_are_tables(client: Client) -> None:
    models = client.models()
    assert models.loc["demo:pirate", "parent"] == "demo"
    assert list(client.tokens(PROMPT)["piece"]) == ["Once", " upon", " a", " time"]
    replicas = client.replicas()
    assert list(replicas["model"]) == ["demo"]
    assert replicas.loc[replicas.index[0], "steps"] >= 0
    assert "serve_app_requests_total" in set(client.metrics()["name"])


def test_every_table_is_the_same_after_parquet(client: Client, tmp_path: Path) -> None:
    one = client.complete(PROMPT, "demo", max_tokens=3, logprobs=3)
    tables = [one.frame(), one[0].frame(), client.models(), client.replicas(), client.metrics(), client.usage()]
    tables += [client.tokens("ö 😀 a", "demo"), client.score(PROMPT, [" a"], "demo"), client.perplexity(PROMPT, "demo")]
    tables += [client.grid_cost(PROMPT, "demo", [{"stop": "x"}, {"stop": ["x", "y"], "max_tokens": 4}])]
    for frame in tables:
        frame.to_parquet(tmp_path / "table.parquet")
        assert_frame_equal(pandas.read_parquet(tmp_path / "table.parquet"), frame)
    assert json.loads(one[0].frame()["alternatives"].iloc[0]) == dict(one[0].tokens[0].alternatives)
    assert "\\xf0\\x9f" in list(client.tokens("😀", "demo")["piece"])


def test_usage_is_what_the_service_counted(client: Client) -> None:
    before = len(client.usage())
    answer = client.complete([PROMPT, "The owl"], "demo", max_tokens=3, ignore_eos=True)
    row = client.usage().iloc[-1]
    assert len(client.usage()) == before + 1
    assert (row["completion_tokens"], row["choices"]) == (6, 2)
    assert row["prompt_tokens"] == answer.usage["prompt_tokens"]


def test_more_prompts_than_one_request_takes_are_several_requests(client: Client) -> None:
    batch = client.complete(["The cat"] * 257, "demo", max_tokens=1, temperature=0)
    assert [each.index for each in batch] == list(range(257))
    assert len({each.text for each in batch}) == 1


def test_a_score_is_what_the_tokens_would_have_been_drawn_with(client: Client) -> None:
    written = client.complete(PROMPT, "demo:pirate", max_tokens=6, temperature=0, logprobs=0)[0]
    (score,) = client.score(PROMPT, [written.text], "demo:pirate").to_dict("records")
    assert score["tokens"] == len(written.tokens)
    assert score["logprob"] == pytest.approx(written.logprob, abs=1e-4)
    assert client.score(PROMPT, [written.text], "demo")["logprob"].item() < score["logprob"]


def test_an_embedding_is_the_mean_of_the_hidden_states_at_length_one(client: Client) -> None:
    states = client.hidden_states(PROMPT, "demo")
    assert len(states) == len(client.tokens(PROMPT, "demo"))
    mean = states.mean(axis=0)
    (vector,) = client.embed(PROMPT, "demo")
    assert vector == pytest.approx(mean / numpy.linalg.norm(mean), abs=1e-5)


def test_cells_of_prompts_are_completed_and_compared(client: Client) -> None:
    shell = InteractiveShell()
    load_ipython_extension(shell)
    shell.user_ns["client"] = client
    one = shell.run_cell_magic("complete", "demo --max-tokens 4 --temperature 0", f"{PROMPT}\n")
    assert one.text == client.complete(PROMPT, "demo", max_tokens=4, temperature=0).text
    shell.run_cell_magic("compare", "demo demo:pirate --max-tokens 4 --into table", f"{PROMPT}\nThe owl\n")
    assert shell.user_ns["table"].prompts == (PROMPT, "The owl")
