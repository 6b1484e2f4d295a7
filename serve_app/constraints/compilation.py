"""Compiles a constraint's source to a grammar of llguidance, and tries the grammar.

A trial runs in the sandbox, where the kernel may end it at any moment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import prod
from multiprocessing.connection import Connection
from random import Random
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.gbnf import quoted, read_gbnf, to_lark
from serve_app.constraints.json_schema import WHITESPACE, PreparedSchema, prepare_schema
from serve_app.constraints.limits import ConstraintLimits, Refusal, check_length, parser_limits, shortest_match
from serve_app.constraints.structural_tag import (
    Special,
    relaxed,
    schemas_in,
    structural_tag_to_lark,
    tool_calls_to_lark,
)
from serve_app.constraints.vocabulary import Vocabulary
from serve_app.core.request import ConstraintKind
from serve_app.sandbox.child import Work, bound_memory, bound_time, take_job

MAX_REASON_CHARS = 300
NUM_FOLLOWED = 32
NUM_FOLLOWED_RULES = 128
"""Tokens that a trial follows a grammar for, more where a client wrote its rules: what soon costs too much is found
before it is answered."""
ALLOWING = re.compile(rb"[^\0]")
NOTHING_FITS = "no text satisfies it"
NO_SPECIAL: Special = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A compiled grammar.

    text:      as the library reads it
    formats:   formats in its schemas that are not enforced
    has_rules: that a client wrote, which may be ambiguous
    """

    text: str
    formats: tuple[str, ...] = ()
    has_rules: bool = False


def compile_source(kind: ConstraintKind, source: str, tokenizer: LLTokenizer, special: Special = NO_SPECIAL) -> Grammar:
    """Compile a source, build its grammar and follow it for a few tokens. Raises Refusal.

    special: tokens of the model by their names, which calls of tools may be written with
    """
    try:
        return _compiled(kind, source, tokenizer, special)
    except Refusal:
        other = relaxed(source) if kind == "tools" else None
        if other is None:
            raise
        return _compiled(kind, other, tokenizer, special)


def _compiled(kind: ConstraintKind, source: str, tokenizer: LLTokenizer, special: Special) -> Grammar:
    try:
        grammar = _grammar(kind, source, special)
    except RecursionError:
        raise Refusal("it is nested too deeply") from None
    try:
        _try(grammar, tokenizer)
    except Refusal:
        for path, schema in _schemas(kind, source):
            _find_culprit(prepare_schema(schema), path)
        raise
    return grammar


def build_matcher(text: str, tokenizer: LLTokenizer, *, has_rules: bool = False) -> LLMatcher:
    """Build the matcher of a tried grammar, with the limits for its kind. Releases the GIL."""
    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits(has_rules=has_rules))


def _schemas(kind: ConstraintKind, source: str) -> Iterator[tuple[str, str]]:
    """Yield the schemas in a source, with the prefix of their paths."""
    if kind in ("json_schema", "compact_json"):
        yield "#", source
    if kind == "tools":
        yield from schemas_in(source)


def _grammar(kind: ConstraintKind, source: str, special: Special) -> Grammar:
    match kind:
        case "json_schema" | "compact_json":
            is_compact = kind == "compact_json"
            prepared = prepare_schema(source, whitespace=None if is_compact else WHITESPACE)
            text = _of_schema(prepared.schema)
            is_short = forces_little(prepared.schema, is_compact=is_compact)
            return Grammar(text=text if is_short else without_forcing(text), formats=prepared.formats)
        case "gbnf":
            symbol, lines = to_lark(read_gbnf(source))
            return Grammar(text=without_forcing("\n".join((f"start: {symbol}", *lines))), has_rules=True)
        case "structural_tag":
            text, formats = structural_tag_to_lark(source)
            return Grammar(text=without_forcing(text), formats=formats, has_rules='"grammar"' in source)
        case "tools":
            text, formats = tool_calls_to_lark(source, special)
            return Grammar(text=without_forcing(text), formats=formats, has_rules='"gbnf"' in source)
        case "choice":
            texts = json.loads(source)
            check_length(min(map(len, texts)))
            text = "start: TEXT\nTEXT: " + " | ".join(map(quoted, texts))
            is_short = max(map(len, texts)) <= MAX_LITERAL_CHARS
            return Grammar(text=text if is_short else without_forcing(text))
        case "regex":
            check_length(shortest_match(source))
            return Grammar(text=without_forcing(LLMatcher.grammar_from_regex(source)))
        case "lark":
            return Grammar(text=without_forcing(LLMatcher.grammar_from_lark(source)), has_rules=True)
        case "llguidance":
            return Grammar(text=without_forcing(source), has_rules=True)


def _of_schema(schema: Mapping[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _try(grammar: Grammar, tokenizer: LLTokenizer) -> None:
    matcher = build_matcher(grammar.text, tokenizer, has_rules=grammar.has_rules)
    if matcher.is_error():
        raise Refusal(_reason(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise Refusal(_reason(matcher.get_error()))
    if not any(mask):
        raise Refusal(NOTHING_FITS)
    _follow(matcher, mask, tokenizer.eos_tokens, NUM_FOLLOWED_RULES if grammar.has_rules else NUM_FOLLOWED)


def _follow(matcher: LLMatcher, mask: bytes, ending: Sequence[int], num_tokens: int) -> None:
    """Take some tokens, any of those that are allowed. Raises Refusal where the next mask costs more than it may.

    What leads nowhere is no reason: a model may know better.
    """
    draw = Random(0)  # nosec B311
    for _ in range(num_tokens):
        token_id = _some_token(mask, ending, draw)
        if token_id is None or not matcher.consume_token(token_id) or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
    if matcher.is_error() and _reason(matcher.get_error()) != NOTHING_FITS:
        raise Refusal(f"it takes too much work to follow: {_reason(matcher.get_error())}")


def _some_token(mask: bytes, ending: Sequence[int], draw: Random) -> int | None:
    """Return a token that the mask allows and that ends nothing, from anywhere in it; None if there is no other."""
    begins = draw.randrange(len(mask))
    for found in (*ALLOWING.finditer(mask, begins, begins + 64), *islice(ALLOWING.finditer(mask), 4)):
        for bit in range(8):
            token_id = 8 * found.start() + bit
            if mask[found.start()] >> bit & 1 and token_id not in ending:
                return token_id
    return None


def _find_culprit(prepared: PreparedSchema, within: str) -> None:
    """Raise Refusal for the first part that fails by itself: the library says what it lacks, but not where."""
    parts: list[tuple[str, str, dict[str, Any]]] = []
    parts += [(path, "pattern", {"type": "string", "pattern": pattern}) for path, pattern in prepared.patterns.items()]
    parts += [(path, "oneOf", one_of) for path, one_of in prepared.one_ofs.items()]
    for path, counted in prepared.counted.items():
        parts += [(path, name, counted) for name in ("minProperties", "maxProperties") if name in counted][:1]
    for path, name, schema in parts:
        failure = LLMatcher.validate_grammar(_of_schema(schema), limits=parser_limits())
        if failure and not failure.startswith("WARNING"):
            raise Refusal(f'"{name}" cannot be enforced: {_reason(failure)}', within + path.removeprefix("#"))


def _reason(error: str) -> str:
    """Return the library's message on one line, without its quotes of the grammar."""
    if "NoExtension" in error:
        return NOTHING_FITS
    lines = [line.strip() for line in error.splitlines() if line.strip() and " | " not in line]
    return " ".join(lines)[:MAX_REASON_CHARS].rstrip(". ") or "the library does not take it"


MAX_LITERAL_CHARS = 512
"""Of a name, a constant, or one of a few."""
MAX_REPEATED = 64
"""Times that a pattern, or a least length, repeats a part."""
WITHOUT = '%llguidance {"no_forcing": true}'
"""Of several such lines the last one counts."""
COUNT = re.compile(r"\{(\d+)(?:,\d*)?\}")


def forces_little(schema: Any, *, is_compact: bool) -> bool:
    """Return whether every text that a prepared schema forces is short.

    Wherever a constraint leaves one text, the library looks at all of it at every token, to find the token that comes
    first: 0.1 s each time for fifty thousand characters. So it looks for forced tokens only if no forced text is long;
    otherwise it allows every token that begins the text, at the cost of any other mask.

    is_compact: there is no white space that would end such a text, so that parts of it follow each other
    """
    if is_compact and (len(json.dumps(schema)) > 4 * MAX_LITERAL_CHARS or _most(schema, "minItems") > 1):
        return False
    repeated = max(map(_repeated, _patterns(schema)), default=1)
    is_repeated = repeated > MAX_REPEATED or (_most(schema, "minLength") > MAX_REPEATED and any(_patterns(schema)))
    return not is_repeated and all(len(each) <= MAX_LITERAL_CHARS for each in _texts(schema))


def without_forcing(text: str) -> str:
    """Return the same grammar, in Lark or in the library's JSON, without the search for forced tokens."""
    if not text.lstrip().startswith("{"):
        return f"{text}\n{WITHOUT}"
    try:
        members = json.loads(text)
        grammars = [_unforced(each) for each in members["grammars"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return text  # the library will say what is wrong with it
    return json.dumps({**members, "grammars": grammars})


def _unforced(grammar: dict[str, Any]) -> dict[str, Any]:
    """Return one grammar without the search; a schema is wrapped in Lark, which alone has such a line."""
    if grammar.get("json_schema") is not None:
        source = f"start: %json {json.dumps(grammar['json_schema'])}"
        return {**grammar, "json_schema": None, "lark_grammar": f"{source}\n{WITHOUT}"}
    return {**grammar, "lark_grammar": f"{grammar['lark_grammar']}\n{WITHOUT}"}


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every member of every object in the value."""
    match value:
        case dict():
            for name, each in value.items():
                yield name, each
                yield from _members(each)
        case list():
            for each in value:
                yield from _members(each)


def _texts(schema: Any) -> Iterator[str]:
    for name, value in _members(schema):
        yield name
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each


def _patterns(schema: Any) -> Iterator[str]:
    for name, value in _members(schema):
        if name == "pattern" and isinstance(value, str):
            yield value
        if name == "patternProperties" and isinstance(value, dict):
            yield from value


def _repeated(pattern: str) -> int:
    """Return how often a pattern repeats a part at most; counts of nested groups multiply."""
    counts = [int(each) for each in COUNT.findall(pattern)]
    return prod(counts) if "){" in pattern else max(counts, default=1)


def _most(schema: Any, keyword: str) -> float:
    return max((value for name, value in _members(schema) if name == keyword and isinstance(value, int)), default=0)


def prepare(first: tuple[Vocabulary, ConstraintLimits]) -> Work:
    """Build the tokenizer and return the work of each child: it takes one constraint and answers."""
    vocabulary, limits = first
    tokenizer = vocabulary.tokenizer()

    def take_one(connection: Connection) -> None:
        bound_time(cpu_s=limits.max_cpu_s, wall_s=limits.max_wall_s)
        bound_memory(limits.max_trial_bytes)
        job = json.loads(take_job(connection))
        bound_time(cpu_s=limits.max_cpu_s, wall_s=job["wall_s"])
        connection.send_bytes(json.dumps(_answer(job, tokenizer, vocabulary)).encode())

    return take_one


def _answer(job: dict[str, Any], tokenizer: LLTokenizer, vocabulary: Vocabulary) -> dict[str, object]:
    try:
        return asdict(compile_source(job["kind"], job["source"], tokenizer, dict(vocabulary.special)))
    except Refusal as refusal:
        return {"refused": refusal.message, "path": refusal.path}
