"""What the contract says in prose because a schema cannot: each rule makes a body that fits the description obey it.

What obeys the description and these rules is answered, whatever it is. Nothing but the standard library is used, so
that tools of other environments may import this.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.api.error_text import nearest

Body = dict[str, Any]
MOST_TOKENS = 4
MOST_MODELS = 2
MOST_CHOICES = 4
FOLLOWED: Mapping[str, str] = {
    "json_schema": "{}",
    "regex": "[a-z]*",
    "gbnf": "root ::= [a-z]*",
    "lark": "start: /[a-z]*/",
    "llguidance": '{"grammars": [{"lark_grammar": "start: /[a-z]*/"}]}',
}
"""A source in each language that any model can follow."""
SOURCES: Mapping[str, str] = {
    "json_schema": "json_schema", "guided_json": "json_schema", "regex": "regex", "guided_regex": "regex",
    "ebnf": "gbnf", "grammar": "gbnf", "grammar_string": "gbnf", "guided_grammar": "gbnf",
}  # fmt: skip
"""The language of each parameter that is a source by itself."""
PLAIN_PATTERN = re.compile(r"[a-z0-9 ]{1,40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served, and in which dialect it is described.

    dialect:    one element of `data` at /v1/dialects
    models:     names that can be sent as `model`; the first has no adapter
    vocab_size: of all of them
    max_chars:  of a text that fits the context in any case
    """

    dialect: Mapping[str, Any]
    models: tuple[str, ...]
    vocab_size: int
    max_chars: int = 64

    def names_of(self, name: str) -> list[str]:
        """Every name of a parameter."""
        others = [other for other, each in self.dialect["parameters"].items() if each.get("to") == name]
        return [name, *others]

    def sent(self, body: Body, name: str) -> Any:
        """The value of a parameter under any of its names; its default where it has none."""
        found = (body[each] for each in self.names_of(name) if body.get(each) is not None)
        return next(found, self.dialect["defaults"].get(name))


def obey(body: Body, served: Served, *, is_completion: bool = True) -> Body:
    """The same body with what the rules ask for; the body itself is not changed.

    is_completion: and no chat that is only rendered or cut into tokens
    """
    body = copy.deepcopy(body)
    for rule in RULES if is_completion else CHAT_RULES:
        rule(body, served)
    return {name: value for name, value in body.items() if name != ""}


def models_are_served(body: Body, served: Served) -> None:
    """A model is one that is served, an adapter one of it: any other is a 404, of a model without adapters a 400."""
    sent = body.get("model")
    if isinstance(sent, list):
        body["model"] = [served.models[len(each) % len(served.models)] for each in sent[:MOST_MODELS]]
    elif sent is not None:
        body["model"] = served.models[len(sent) % len(served.models)]
    if body.get("lora_path") is not None:
        body["lora_path"] = [None] * prompts_in(body.get("prompt", "")) if isinstance(body["lora_path"], list) else None
    if body.get("adapter") is not None:
        body["adapter"] = None
    if body.get("lora"):
        body["lora"] = [{**each, "scale": 0} for each in body["lora"]]


def names_agree(body: Body, served: Served) -> None:
    """Two names of one parameter have the same value."""
    for name in served.dialect["parameters"]:
        sent = [each for each in served.names_of(name) if body.get(each) is not None]
        for other in sent[1:]:
            del body[other]


def misspelled_names_are_none(body: Body, served: Served) -> None:
    """A name that looks like a misspelled one that changes answers is refused; others that are nobody's are ignored."""
    known = served.dialect["parameters"]
    meant = tuple(name for name, each in known.items() if each["disposition"] in ("carried", "renamed"))
    for name in [name for name in body if name not in known and nearest(name, meant) is not None]:
        del body[name]
    options = body.get("stream_options")
    if options is not None:
        known = ("include_usage", "continuous_usage_stats", "include_obfuscation")
        kept = {name: value for name, value in options.items() if name in known or nearest(name, known) is None}
        body["stream_options"] = kept


def amounts_are_small(body: Body, served: Served) -> None:
    """Prompts, completions and tokens are bounded in their products, and by the context."""
    lengths = [name for name in served.names_of("max_tokens") if body.get(name) is not None]
    for name in lengths:
        body[name] = MOST_TOKENS if body[name] < 0 else min(body[name], MOST_TOKENS)
    if not lengths:
        body["max_tokens"] = MOST_TOKENS
    for name in (*served.names_of("n"), "best_of"):
        if body.get(name) is not None:
            body[name] = min(body[name], MOST_CHOICES)


def counts_are_in_order(body: Body, served: Served) -> None:
    """`min_tokens` is at most `max_tokens`; `best_of` at least `n`, or at most where it counts what is returned."""
    if body.get("min_tokens") is not None:
        body["min_tokens"] = min(body["min_tokens"], served.sent(body, "max_tokens"))
    if body.get("best_of"):
        order = min if served.dialect["meanings"]["best_of"].startswith("returned") else max
        body["best_of"] = order(body["best_of"], served.sent(body, "n"))


def counts_of_logprobs_agree(body: Body, served: Served) -> None:
    """`top_logprobs` beside a count is that count."""
    count = served.sent(body, "logprobs")
    if body.get("top_logprobs") is not None and count is not None and not isinstance(count, bool):
        body["top_logprobs"] = count


def samplers_are_in_order(body: Body, served: Served) -> None:
    """Each sampler stands once, under either of its names; those that edit logits come first."""
    if body.get("samplers") is not None:
        names = dict.fromkeys(
            {"typical_p": "typ_p", "temp": "temperature"}.get(name, name) for name in body["samplers"]
        )
        body["samplers"] = sorted(names, key=lambda name: name not in ("penalties", "dry"))


def constraints_can_be_followed(body: Body, served: Served) -> None:
    """A schema, a grammar or an expression can be followed, and a string that has to be JSON is an object's."""
    for name, kind in SOURCES.items():
        value = body.get(name)
        if SOURCES[name] == "gbnf" and isinstance(value, dict):
            body[name] = {**value, "value": followed(value["type"], value["value"])}
        elif value:
            body[name] = followed(kind, value)
    if body.get("response_format") is not None:
        body["response_format"] = followed_format(body["response_format"])
    if body.get("structured_outputs") is not None:
        sent = body["structured_outputs"]
        body["structured_outputs"] = {name: followed_output(name, value) for name, value in sent.items()}


def patterns_are_supported(body: Body, served: Served) -> None:
    """An expression is of a syntax that is matched in one pass."""
    patterns = body.get("stop_regex")
    if patterns is not None:
        several = [patterns] if isinstance(patterns, str) else patterns
        body["stop_regex"] = [each if PLAIN_PATTERN.fullmatch(each) else "x+y" for each in several]


def records_are_allowed(body: Body, served: Served) -> None:
    """Hidden states and chosen experts are asked of models that are configured to return them."""
    for name in ("return_hidden_states", "return_routed_experts"):
        if body.get(name) is not None:
            body[name] = False


def ids_are_of_the_vocabulary(body: Body, served: Served) -> None:
    """Which ids there are is the model's to say."""
    size = served.vocab_size
    if body.get("stop_token_ids") is not None:
        body["stop_token_ids"] = [each and each % size for each in body["stop_token_ids"]]
    if body.get("allowed_token_ids"):
        body["allowed_token_ids"] = sorted({*(each % size for each in body["allowed_token_ids"]), *range(size // 2)})
    bias = body.get("logit_bias")
    if isinstance(bias, dict):
        body["logit_bias"] = {within(key, size): value for key, value in bias.items()}
    elif bias is not None:
        body["logit_bias"] = [[within(key, size), value] for key, value in bias]


def tools_have_names_of_their_own(body: Body, served: Served) -> None:
    """Each tool has a name of its own, and those that are chosen are among them."""
    named: dict[str, Any] = {}
    for tool in body.get("tools") or ():
        named.setdefault(tool["function"]["name"], tool)
    if named:
        body["tools"] = list(named.values())
        first = {"type": "function", "function": {"name": next(iter(named))}}
        match body.get("tool_choice"):
            case {"type": "function"}:
                body["tool_choice"] = first
            case {"allowed_tools": allowed}:
                body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {**allowed, "tools": [first]}}


def images_have_places(body: Body, served: Served) -> None:
    """Images are whole files, as many as the prompt has places for them, and the model sees."""
    for name in served.names_of("images"):
        body.pop(name, None)
    for message in body.get("messages") or ():
        if isinstance(message.get("content"), list):
            message["content"] = [each for each in message["content"] if each.get("type") != "image_url"]


def prompts_fit(body: Body, served: Served) -> None:
    """A prompt fits the context, and its ids are of the vocabulary."""
    if isinstance(body.get("prompt"), str | list | dict):
        body["prompt"] = fitting(body["prompt"], served)


def answers_are_gone_on_with(body: Body, served: Served) -> None:
    """`continue_final_message` goes on with an assistant's last message; arguments in a string are an object's."""
    for message in body.get("messages") or ():
        for call in message.get("tool_calls") or () if message["role"] == "assistant" else ():
            if isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = "{}"
    if body.get("continue_final_message"):
        body["messages"] = [*body["messages"], {"role": "assistant", "content": "So"}]


def followed(kind: str, sent: object) -> object:
    """A source in the same language and form, as an object or as text, that any model can follow."""
    return json.loads(FOLLOWED[kind]) if isinstance(sent, dict) else FOLLOWED[kind]


def followed_format(sent: Body) -> Body:
    """The same response format with sources that can be followed."""
    match sent["type"]:
        case "grammar":
            return {**sent, "grammar": FOLLOWED["gbnf"]}
        case "structural_tag":
            return {"type": "structural_tag", "format": {"type": "any_text"}}
        case _:
            return {name: followed_member(name, value) for name, value in sent.items()}


def followed_output(name: str, value: Any) -> Any:
    """A member of vLLM's structured outputs."""
    match name:
        case "structural_tag" if value:
            return {"type": "structural_tag", "format": {"type": "any_text"}}
        case "json" | "regex" | "grammar" if value not in (None, ""):
            return followed({"json": "json_schema", "regex": "regex", "grammar": "gbnf"}[name], value)
        case _:
            return value


def followed_member(name: str, value: Any) -> Any:
    """A member of a response format; a schema is bare, or in a wrapper that has a name."""
    if name not in ("schema", "json_schema") or value is None:
        return value
    is_wrapper = isinstance(value, dict) and ("schema" in value or isinstance(value.get("name"), str))
    if name == "json_schema" and is_wrapper:
        return {inner: followed_member(inner, each) for inner, each in value.items()}
    return followed("json_schema", value)


def within(key: object, size: int) -> object:
    if isinstance(key, str):
        return str(int(key[:9]) % size) if re.fullmatch(r"-?[0-9]+", key) else key[:8]
    assert isinstance(key, int | float)
    return key % size


def texts_pair_up(body: Body, served: Served) -> None:
    """Of several first texts there are as many as of second ones."""
    first, second = body.get("text_1"), body.get("text_2")
    if isinstance(first, list) and len(first) > 1 and (not isinstance(second, list) or len(first) != len(second)):
        body["text_1"] = first[0]


def fitting(prompt: Any, served: Served) -> Any:
    match prompt:
        case str():
            return prompt[: served.max_chars]
        case {"prompt_string": inner}:
            return {"prompt_string": fitting(inner, served)}
        case list() if any(is_number(each) for each in prompt):
            tail = prompt[next(at for at, each in enumerate(prompt) if is_number(each)) :]
            return [each % served.vocab_size if is_number(each) else each[:8] for each in tail[:16]]
        case list():
            return [fitting(each, served) for each in prompt[:MOST_CHOICES]]
    raise AssertionError(prompt)


def prompts_in(prompt: Any) -> int:
    is_one = not isinstance(prompt, list) or any(is_number(each) for each in prompt)
    return 1 if is_one else min(len(prompt), MOST_CHOICES)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


RULES: tuple[Callable[[Body, Served], None], ...] = (
    models_are_served,
    names_agree,
    misspelled_names_are_none,
    amounts_are_small,
    counts_are_in_order,
    counts_of_logprobs_agree,
    samplers_are_in_order,
    patterns_are_supported,
    constraints_can_be_followed,
    records_are_allowed,
    ids_are_of_the_vocabulary,
    tools_have_names_of_their_own,
    images_have_places,
    prompts_fit,
    answers_are_gone_on_with,
)
CHAT_RULES = (
    models_are_served, tools_have_names_of_their_own, images_have_places, answers_are_gone_on_with, texts_pair_up
)  # fmt: skip
"""Those that concern what is no completion: a chat itself, and texts that are scored."""


def told() -> Iterator[str]:
    """Each rule in a sentence."""
    for rule in RULES:
        assert rule.__doc__ is not None
        yield " ".join(rule.__doc__.split())
