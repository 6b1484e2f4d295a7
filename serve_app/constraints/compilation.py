"""Turns a constraint into the one form that everything behind it knows: a grammar of the library.

Runs in a trial, a process that may be ended at any moment: see `trial_process`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.forcing import MAX_LITERAL_CHARS, forces_little, without_forcing
from serve_app.constraints.gbnf import read_gbnf
from serve_app.constraints.json_schema import WHITESPACE, PreparedSchema, prepare_schema
from serve_app.constraints.lark import quoted, to_lark
from serve_app.constraints.limits import parser_limits
from serve_app.constraints.marked_arguments import Special
from serve_app.constraints.reach import check_length
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.regex_length import shortest_match
from serve_app.constraints.structural_tag import structural_tag_to_lark
from serve_app.constraints.tool_calls import relaxed, schemas_in, tool_calls_to_lark
from serve_app.core.request import ConstraintKind

MAX_REASON_CHARS = 300
NUM_FOLLOWED = 32
NUM_FOLLOWED_RULES = 128
"""Tokens that a trial follows a grammar for, more where a client wrote its rules: what soon costs too much is found
before it is answered."""
ALLOWING = re.compile(rb"[^\0]")
NOTHING_FITS = "no text satisfies it"
NO_SPECIAL: Special = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """text:      as the library reads it
    formats:   that a schema asks for and nobody enforces
    has_rules: that a client wrote, which may be ambiguous
    """

    text: str
    formats: tuple[str, ...] = ()
    has_rules: bool = False


def compile_source(kind: ConstraintKind, source: str, tokenizer: LLTokenizer, special: Special = NO_SPECIAL) -> Grammar:
    """The grammar, tried: it was built, begins with some token, and was followed for a few. Raises Refusal.

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
    """Of a grammar that was tried, with the limits for its kind. Other threads run meanwhile."""
    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits(has_rules=has_rules))


def _schemas(kind: ConstraintKind, source: str) -> Iterator[tuple[str, str]]:
    """Those that a source is made of, with what stands before their paths."""
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
    """One that the mask allows and that ends nothing, from anywhere in it; None where there is no other."""
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
    """The library's words on one line, without what it quotes of the grammar."""
    if "NoExtension" in error:
        return NOTHING_FITS
    lines = [line.strip() for line in error.splitlines() if line.strip() and " | " not in line]
    return " ".join(lines)[:MAX_REASON_CHARS].rstrip(". ") or "the library does not take it"
