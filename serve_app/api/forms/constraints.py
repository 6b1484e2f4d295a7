"""Values that say what a text has to be: grammars, schemas, regular expressions, and a response format.

Here only their form is read. What they say is judged by the model's replica, where it is compiled. None is neutral.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from serve_app.api.error_text import shown
from serve_app.api.forms.form import Boolean, Form, Terms, Value, check_amount
from serve_app.api.forms.schema import (
    BOOLEAN,
    NOTHING,
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    nullable,
    record,
    string,
    tagged,
)
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import Constraint, ConstraintKind

ANY_OBJECT: Mapping[str, object] = {"type": "object"}
JSON_TEXT = "an object, or JSON of one in a string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One text in one language; the empty one is neutral."""

    kind: ConstraintKind
    what: str

    def words(self, terms: Terms) -> str:
        return f"{self.what} {_bound(terms)}"

    def schema(self, terms: Terms) -> Schema:
        return _text_of(terms)

    def read(self, value: Value) -> Constraint | None:
        if not isinstance(value.sent, str):
            raise value.refused(self.words(value.terms))
        return _constraint(self.kind, value.sent, value) if value.sent else None


REGEX = Source(kind="regex", what="a regular expression")
EBNF = Source(kind="gbnf", what="a grammar in EBNF, as GBNF")


class JsonSchema:
    """A JSON schema, as it is or written in a string; an empty string is neutral, an empty object is any JSON."""

    def words(self, terms: Terms) -> str:
        return f"a JSON schema, which is {JSON_TEXT}, {_bound(terms)}"

    def schema(self, terms: Terms) -> Schema:
        return _json_of(terms)

    def read(self, value: Value) -> Constraint | None:
        return None if value.sent == "" else _schema_constraint(value.sent, value, self.words(value.terms))


class Grammar:
    """A grammar in GBNF, or an object that says what it is written in (mistral.rs); an empty string is neutral."""

    def words(self, terms: Terms) -> str:
        kinds = ", ".join(TAGGED)
        return f'a grammar in GBNF {_bound(terms)}, or an object of a "type" ({kinds}) and a "value"'

    def schema(self, terms: Terms) -> Schema:
        text = _text_of(terms)
        values = {"regex": text, "lark": text, "json_schema": _json_of(terms), "llguidance": _json_of(terms)}
        return either(text, *(tagged(name, {"value": values[name]}) for name in TAGGED))

    def read(self, value: Value) -> Constraint | None:
        if isinstance(value.sent, str):
            return _constraint("gbnf", value.sent, value) if value.sent else None
        read, sent = _by_type(TAGGED, value, self)
        if sent.get("value") is None:
            raise value.part_refused("value", 'what the "type" says', None)
        return read(sent["value"], value)


class ResponseFormat:
    """What all systems call the response's format; text is neutral."""

    def words(self, terms: Terms) -> str:
        return f'an object whose "type" is {_one_of(FORMATS)}, with what belongs to it'

    def schema(self, terms: Terms) -> Schema:
        source, has_schema, named = _json_of(terms), {"required": ["schema"]}, record({"name": STRING})
        bare = either(_text_of(terms), {**OBJECT, "not": either(has_schema, named)})
        empty = nullable(record({"schema": NOTHING}), {**named, "not": has_schema})
        return either(
            tagged("text"),
            tagged("json_object", schema=nullable(*source["anyOf"])),
            tagged("json_schema", {"json_schema": record({"schema": source})}),
            tagged("json_schema", {"json_schema": bare}),
            tagged("json_schema", {"schema": source}, json_schema=empty),
            tagged("grammar", {"grammar": {**_text_of(terms), "minLength": 1}}),
            tagged("structural_tag"),
        )

    def read(self, value: Value) -> Constraint | None:
        read, sent = _by_type(FORMATS, value, self)
        return read(sent, value)


Read = TypeVar("Read")


def _by_type(table: Mapping[str, Read], value: Value, form: Form) -> tuple[Read, Mapping[str, object]]:
    """Return what reads an object of its `type`, and that object. Raises InvalidRequest for another value."""
    kind = value.sent.get("type") if isinstance(value.sent, dict) else None
    if not isinstance(value.sent, dict) or not isinstance(kind, str) or kind not in table:
        raise value.refused(form.words(value.terms))
    return table[kind], value.sent


def _tagged_text(kind: ConstraintKind) -> Callable[[object, Value], Constraint]:
    def read(text: object, value: Value) -> Constraint:
        if not isinstance(text, str):
            raise value.part_refused("value", "a string", text)
        return _constraint(kind, text, value)

    return read


def _tagged_llguidance(sent: object, value: Value) -> Constraint:
    parsed = parsed_json(sent, value)
    if not isinstance(parsed, dict):
        raise value.part_refused("value", JSON_TEXT, sent)
    return _constraint("llguidance", _written(parsed), value)


def _tagged_schema(sent: object, value: Value) -> Constraint:
    return _schema_constraint(sent, value, f'an object whose "value" is {JSON_TEXT}')


TAGGED: Mapping[str, Callable[[object, Value], Constraint]] = {
    "regex": _tagged_text("regex"),
    "json_schema": _tagged_schema,
    "lark": _tagged_text("lark"),
    "llguidance": _tagged_llguidance,
}
"""What the `value` of a grammar means, by its `type`."""


def _format_json_object(sent: Mapping[str, object], value: Value) -> Constraint:
    schema = sent.get("schema")
    return _schema_constraint(ANY_OBJECT if schema is None else schema, value, f'one whose "schema" is {JSON_TEXT}')


def _format_json_schema(sent: Mapping[str, object], value: Value) -> Constraint:
    """Read the schema from OpenAI's wrapper, bare in its place, or beside the type."""
    wrapped = sent.get("json_schema")
    if isinstance(wrapped, dict) and ("schema" in wrapped or isinstance(wrapped.get("name"), str)):
        wrapped = wrapped.get("schema")
    schema = sent.get("schema") if wrapped is None else wrapped
    if schema is None:
        raise InvalidRequest.refusing(value.name, must='have a schema where its "type" is "json_schema"', found="none")
    return _schema_constraint(schema, value, f"one whose schema is {JSON_TEXT}")


def _format_grammar(sent: Mapping[str, object], value: Value) -> Constraint:
    grammar = sent.get("grammar")
    if not isinstance(grammar, str) or not grammar:
        raise value.part_refused("grammar", "a grammar in GBNF", grammar)
    return _constraint("gbnf", grammar, value)


def _format_structural_tag(sent: Mapping[str, object], value: Value) -> Constraint:
    return _constraint("structural_tag", _written(sent), value)


FORMATS: Mapping[str, Callable[[Mapping[str, object], Value], Constraint | None]] = {
    "text": lambda sent, value: None,
    "json_object": _format_json_object,
    "json_schema": _format_json_schema,
    "grammar": _format_grammar,
    "structural_tag": _format_structural_tag,
}
"""What a response format asks for, by its `type`."""


def _schema_constraint(sent: object, value: Value, allowed: str) -> Constraint:
    parsed = parsed_json(sent, value)
    if not isinstance(parsed, Mapping | bool):
        raise value.refused(allowed)
    return _constraint("json_schema", _written(parsed), value)


def parsed_json(sent: object, value: Value) -> object:
    """Return what a string of JSON holds; anything but a string is returned as it is."""
    if not isinstance(sent, str):
        return None if isinstance(sent, bool) else sent
    _check_length(sent, value)
    try:
        return json.loads(sent, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        found = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest.refusing(value.name, must="be valid JSON", found=f"this: {found[:100]}") from None


def _constraint(kind: ConstraintKind, source: str, value: Value) -> Constraint:
    _check_length(source, value)
    return Constraint(kind=kind, source=source, name=value.name)


def _check_length(source: str, value: Value) -> None:
    check_amount(len(source), value.terms.limits.max_constraint_chars, value.name, must="have at most {} characters")


def _written(value: Any) -> str:
    """Return compact JSON in the order that was sent, which becomes the order of properties in the text."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False, separators=(",", ":"))


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"found {literal}")


def _text_of(terms: Terms) -> Schema:
    return string(most=terms.limits.max_constraint_chars)


def _json_of(terms: Terms) -> Schema:
    """Return the schema of an object, or of JSON of one in a string."""
    return either(OBJECT, {**_text_of(terms), "contentMediaType": "application/json"})


def _one_of(options: Mapping[str, object]) -> str:
    """Return the options as a message lists them."""
    return " or ".join(shown(option) for option in options)


class Choices:
    """A list of strings, none of them empty; of no strings nothing could be said."""

    def words(self, terms: Terms) -> str:
        return f"a list of one or more non-empty strings, {_bound(terms)} together"

    def schema(self, terms: Terms) -> Schema:
        return array(string(least=1, most=terms.limits.max_constraint_chars), least=1)

    def read(self, value: Value) -> Constraint:
        if not isinstance(value.sent, list) or not value.sent:
            raise value.refused(self.words(value.terms))
        found: list[str] = []
        for at, element in enumerate(value.sent):
            if not (isinstance(element, str) and element):
                raise value.part_refused(at, "a non-empty string", element)
            found.append(element)
        most, must = value.terms.limits.max_constraint_chars, "have at most {} characters together"
        check_amount(sum(map(len, found)), most, value.name, must=must)
        return Constraint(kind="choice", source=json.dumps(found, ensure_ascii=False), name=value.name)


EBNF_DEFINES = "::="


class GuidedGrammar:
    """A grammar in EBNF where anything is defined by `::=`, otherwise in Lark; the empty one is neutral."""

    def words(self, terms: Terms) -> str:
        return f'a grammar, in EBNF where it has "{EBNF_DEFINES}" and else in Lark, {_bound(terms)}'

    def schema(self, terms: Terms) -> Schema:
        return _text_of(terms)

    def read(self, value: Value) -> Constraint | None:
        is_ebnf = isinstance(value.sent, str) and EBNF_DEFINES in value.sent
        return Source(kind="gbnf" if is_ebnf else "lark", what="a grammar").read(value)


GUIDED_GRAMMAR = GuidedGrammar()


class AnyObject:
    """True is any JSON object, false is neutral."""

    def words(self, terms: Terms) -> str:
        return "a boolean"

    def schema(self, terms: Terms) -> Schema:
        return BOOLEAN

    def read(self, value: Value) -> Constraint | None:
        is_wanted = Boolean().read(value)
        return JsonSchema().read(replace(value, sent=dict(ANY_OBJECT))) if is_wanted else None


class StructuralTag:
    """What a response format of that type says, or JSON of it in a string; an empty string is neutral."""

    def words(self, terms: Terms) -> str:
        return f'a structural tag, which is an object of "type" "structural_tag" or JSON of one, {_bound(terms)}'

    def schema(self, terms: Terms) -> Schema:
        return either({**_text_of(terms), "contentMediaType": "application/json"}, tagged("structural_tag"))

    def read(self, value: Value) -> Constraint | None:
        if value.sent == "":
            return None
        tag = parsed_json(value.sent, value)
        if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
            raise value.refused(self.words(value.terms))
        return ResponseFormat().read(replace(value, sent={**tag, "type": "structural_tag"}))


KINDS: Mapping[str, Form] = {
    "json": JsonSchema(),
    "regex": REGEX,
    "choice": Choices(),
    "grammar": GUIDED_GRAMMAR,
    "json_object": AnyObject(),
    "structural_tag": StructuralTag(),
}
COMPACT = "disable_any_whitespace"
NEUTRAL_OPTIONS = ("disable_additional_properties", "whitespace_pattern")


class StructuredOutputs:
    """An object with one of the kinds; without any it is neutral."""

    def words(self, terms: Terms) -> str:
        kinds = " or ".join(map(shown, KINDS))
        return f'an object with one of {kinds}, and "{COMPACT}" where JSON is to be without white space'

    def schema(self, terms: Terms) -> Schema:
        options = {COMPACT: {"type": ["boolean", "null"]}, **dict.fromkeys(NEUTRAL_OPTIONS, NOTHING)}
        none = {**dict.fromkeys(KINDS, NOTHING), **options}
        kinds = KINDS.items()
        return either(*(record(optional={**none, name: kind.schema(terms)}, is_closed=True) for name, kind in kinds))

    def read(self, value: Value) -> Constraint | None:
        if not isinstance(value.sent, dict):
            raise value.refused(self.words(value.terms))
        sent = {name: each for name, each in value.sent.items() if each is not None}
        for name in sent:
            self._check_name(name, sent, value)
        is_compact = sent.pop(COMPACT, False)
        found = {}
        for name in KINDS.keys() & sent.keys():
            found[name] = KINDS[name].read(value.part(name, sent[name]))
        sources = [(name, found[name]) for name in KINDS if found.get(name) is not None]
        if len(sources) > 1:
            both = " and ".join(name for name, _ in sources)
            raise InvalidRequest.refusing(value.name, must="hold one kind of constraint", found=both)
        constraint = sources[0][1] if sources else None
        assert constraint is None or isinstance(constraint, Constraint)
        return _compact(constraint) if is_compact else constraint

    def _check_name(self, name: str, sent: Mapping[str, object], value: Value) -> None:
        part = value.part(name, sent[name])
        if name in NEUTRAL_OPTIONS and sent[name] is not False:
            must = "be absent, as it is not carried out here"
            raise UnsupportedParameter.refusing(part.name, must=must, found=shown(sent[name]))
        if name == COMPACT:
            Boolean().read(part)
        elif name not in KINDS and name not in NEUTRAL_OPTIONS:
            raise value.refused(self.words(value.terms))


def _compact(constraint: Constraint | None) -> Constraint | None:
    """Return the constraint without white space if it is JSON; other kinds define their own white space."""
    is_json = constraint is not None and constraint.kind == "json_schema"
    return replace(constraint, kind="compact_json") if constraint is not None and is_json else constraint


def _bound(terms: Terms) -> str:
    return f"of at most {terms.limits.max_constraint_chars} characters"
