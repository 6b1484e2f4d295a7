"""vLLM's ways to say what a text has to be: an object with one of several kinds, and a grammar in either notation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from serve_app.api.forms.choices import Choices
from serve_app.api.forms.constraints import ANY_OBJECT, REGEX, JsonSchema, ResponseFormat, Source, parsed_json
from serve_app.api.forms.form import Form, Schema, Terms, Value
from serve_app.api.forms.plain import Boolean
from serve_app.api.shown import shown
from serve_app.core.errors import InvalidRequest, UnsupportedParameter
from serve_app.core.request import Constraint

EBNF_DEFINES = "::="


@dataclass(frozen=True, slots=True)
class GuidedGrammar:
    """A grammar in EBNF where anything is defined by `::=`, otherwise in Lark; the empty one is neutral."""

    def words(self, terms: Terms) -> str:
        return f'a grammar, in EBNF where it has "{EBNF_DEFINES}" and else in Lark, {_bound(terms)}'

    def schema(self, terms: Terms) -> Schema:
        return {"type": "string", "maxLength": terms.limits.max_constraint_chars}

    def read(self, value: Value) -> Constraint | None:
        is_ebnf = isinstance(value.sent, str) and EBNF_DEFINES in value.sent
        return Source(kind="gbnf" if is_ebnf else "lark", what="a grammar").read(value)


GUIDED_GRAMMAR = GuidedGrammar()


@dataclass(frozen=True, slots=True)
class AnyObject:
    """True is any JSON object, false is neutral."""

    def words(self, terms: Terms) -> str:
        return "a boolean"

    def schema(self, terms: Terms) -> Schema:
        return {"type": "boolean"}

    def read(self, value: Value) -> Constraint | None:
        is_wanted = Boolean().read(value)
        return JsonSchema().read(replace(value, sent=dict(ANY_OBJECT))) if is_wanted else None


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """What a response format of that type says, or JSON of it in a string; an empty string is neutral."""

    def words(self, terms: Terms) -> str:
        return f'a structural tag, which is an object of "type" "structural_tag" or JSON of one, {_bound(terms)}'

    def schema(self, terms: Terms) -> Schema:
        text = {**GUIDED_GRAMMAR.schema(terms), "contentMediaType": "application/json"}
        tag = {"type": "object", "required": ["type"], "properties": {"type": {"const": "structural_tag"}}}
        return {"anyOf": [text, tag]}

    def read(self, value: Value) -> Constraint | None:
        if value.sent == "":
            return None
        tag = parsed_json(value.sent, value)
        if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
            raise value.refused(self.words(value.terms))
        return ResponseFormat().read(replace(value, sent={**tag, "type": "structural_tag"}))


KINDS: Mapping[str, Form] = MappingProxyType(
    {
        "json": JsonSchema(),
        "regex": REGEX,
        "choice": Choices(),
        "grammar": GUIDED_GRAMMAR,
        "json_object": AnyObject(),
        "structural_tag": StructuralTag(),
    }
)
UNSET: Schema = {"type": "null"}
COMPACT = "disable_any_whitespace"
NEUTRAL_OPTIONS = ("disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """An object with one of the kinds; without any it is neutral."""

    def words(self, terms: Terms) -> str:
        kinds = " or ".join(map(shown, KINDS))
        return f'an object with one of {kinds}, and "{COMPACT}" where JSON is to be without white space'

    def schema(self, terms: Terms) -> Schema:
        options = {COMPACT: {"type": ["boolean", "null"]}, **dict.fromkeys(NEUTRAL_OPTIONS, UNSET)}
        none = {**dict.fromkeys(KINDS, UNSET), **options}
        return {
            "anyOf": [
                {"type": "object", "properties": {**none, name: kind.schema(terms)}, "additionalProperties": False}
                for name, kind in KINDS.items()
            ]
        }

    def read(self, value: Value) -> Constraint | None:
        if not isinstance(value.sent, dict):
            raise value.refused(self.words(value.terms))
        sent = {name: each for name, each in value.sent.items() if each is not None}
        for name in sent:
            self._check_name(name, sent, value)
        is_compact = sent.pop(COMPACT, False)
        found = {}
        for name in KINDS.keys() & sent.keys():
            within = replace(value, name=f"{value.name}[{shown(name)}]", sent=sent[name])
            found[name] = KINDS[name].read(within)
        sources = [(name, found[name]) for name in KINDS if found.get(name) is not None]
        if len(sources) > 1:
            both = " and ".join(name for name, _ in sources)
            raise InvalidRequest.refusing(value.name, must="hold one kind of constraint", found=both)
        constraint = sources[0][1] if sources else None
        assert constraint is None or isinstance(constraint, Constraint)
        return _compact(constraint) if is_compact else constraint

    def _check_name(self, name: str, sent: Mapping[str, object], value: Value) -> None:
        path = f"{value.name}[{shown(name)}]"
        if name in NEUTRAL_OPTIONS and sent[name] is not False:
            must = "be absent, as it is not carried out here"
            raise UnsupportedParameter.refusing(path, must=must, found=shown(sent[name]))
        if name == COMPACT:
            Boolean().read(replace(value, name=path, sent=sent[name]))
        elif name not in KINDS and name not in NEUTRAL_OPTIONS:
            raise value.refused(self.words(value.terms))


def _compact(constraint: Constraint | None) -> Constraint | None:
    """Of JSON alone; of anything else white space is the client's own affair."""
    is_json = constraint is not None and constraint.kind == "json_schema"
    return replace(constraint, kind="compact_json") if constraint is not None and is_json else constraint


def _bound(terms: Terms) -> str:
    return f"of at most {terms.limits.max_constraint_chars} characters"
