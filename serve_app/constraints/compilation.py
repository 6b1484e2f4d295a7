"""Turns a constraint into the one form that everything behind it knows: a grammar of the library.

Runs in a trial, a process that may be ended at any moment: see `trial_process`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from serve_app.constraints.forcing import MAX_LITERAL_CHARS, forces_little, without_forcing
from serve_app.constraints.gbnf import read_gbnf
from serve_app.constraints.json_schema import WHITESPACE, PreparedSchema, prepare_schema
from serve_app.constraints.lark import quoted, to_lark
from serve_app.constraints.limits import parser_limits
from serve_app.constraints.marked_arguments import Special
from serve_app.constraints.refusal import Refusal
from serve_app.constraints.structural_tag import structural_tag_to_lark
from serve_app.constraints.tool_calls import relaxed, schemas_in, tool_calls_to_lark
from serve_app.core.constraint import ConstraintKind

MAX_REASON_CHARS = 300
NOTHING_FITS = "no text satisfies it"
NO_SPECIAL: Special = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """text:    as the library reads it
    formats: that a schema asks for and nobody enforces
    """

    text: str
    formats: tuple[str, ...] = ()


def compile_source(kind: ConstraintKind, source: str, tokenizer: LLTokenizer, special: Special = NO_SPECIAL) -> Grammar:
    """The grammar, tried: it was built, and begins with some token. Raises Refusal.

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
        _try(grammar.text, tokenizer)
    except Refusal:
        for path, schema in _schemas(kind, source):
            _find_culprit(prepare_schema(schema), path)
        raise
    return grammar


def build_matcher(text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Of a grammar that was tried. Other threads run meanwhile."""
    return LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())


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
            return Grammar(text=without_forcing("\n".join((f"start: {symbol}", *lines))))
        case "structural_tag":
            text, formats = structural_tag_to_lark(source)
            return Grammar(text=without_forcing(text), formats=formats)
        case "tools":
            text, formats = tool_calls_to_lark(source, special)
            return Grammar(text=without_forcing(text), formats=formats)
        case "choice":
            texts = json.loads(source)
            text = "start: TEXT\nTEXT: " + " | ".join(map(quoted, texts))
            is_short = max(map(len, texts)) <= MAX_LITERAL_CHARS
            return Grammar(text=text if is_short else without_forcing(text))
        case "regex":
            return Grammar(text=without_forcing(LLMatcher.grammar_from_regex(source)))
        case "lark":
            return Grammar(text=without_forcing(LLMatcher.grammar_from_lark(source)))
        case "llguidance":
            return Grammar(text=without_forcing(source))


def _of_schema(schema: Mapping[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def _try(text: str, tokenizer: LLTokenizer) -> None:
    matcher = build_matcher(text, tokenizer)
    if matcher.is_error():
        raise Refusal(_reason(matcher.get_error()))
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise Refusal(_reason(matcher.get_error()))
    if not any(mask):
        raise Refusal(NOTHING_FITS)


def _find_culprit(prepared: PreparedSchema, within: str) -> None:
    """Raise Refusal for the first part that fails by itself: the library says what it lacks, but not where."""
    parts: list[tuple[str, str, dict[str, Any]]] = []
    parts += [(path, "pattern", {"type": "string", "pattern": pattern}) for path, pattern in prepared.patterns.items()]
    parts += [(path, "oneOf", one_of) for path, one_of in prepared.one_ofs.items()]
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
