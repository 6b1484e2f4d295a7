"""Hostile inputs, which cost as much as they can: grammars, regexes, schemas, chat templates, images. Beside them some
that only look so, and large honest images.

Each is a request of its own. A replica that serves the template here renders, by `zoo` of `chat_template_kwargs`, what
a hostile one would make.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import PIL.Image

from tests.engine.test_image_files import BOMB, HOSTILE, png
from tests.pictures import encoded, file_of, picture

Body = dict[str, Any]
Kind = Literal["regex", "schema", "grammar", "template", "chat", "image", "honest images"]
LONG = "ab, " * 60_000
LARGEST = (5000, 5000)
"""As many pixels as an image may have by default."""
OF_OTHER_BOUNDS = ("a size that is too large", "a strip", "more pixels than the size has")
"""Files that are hostile only where images are small; those below take their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """One request. path: where it is sent; is_hostile: whether it is to be refused"""

    kind: Kind
    name: str
    path: str
    body: Body
    is_hostile: bool = True


TEMPLATES: dict[str, str] = {
    "a loop of 10^10": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a text that doubles": (
        "{% set n = namespace(t='aaaaaaaa') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
    ),
    "10^8 characters": "{% for a in range(10000) %}{{ 'aaaaaaaaaa' * 1000 }}{% endfor %}",
    "a product of 10^10": "{{ ('a' * zoo_count) | length }}",
    "a power": "{{ zoo_count ** zoo_count }}",
    "a width of 10^10": "{{ ('%' ~ zoo_count ~ 'd') | format(1) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "marks to be stripped": "{% for a in range(99999) %}{{ ('<' * 30000) | striptags }}{% endfor %}",
    "a failure": "{{ 1 // 0 }}",
}  # fmt: skip


def template() -> str:
    """One for all of them, and a plain one for who asks for none."""
    branches = "".join(f"{{% elif zoo == {name!r} %}}{source}" for name, source in TEMPLATES.items())
    plain = "{% for each in messages %}{{ each.role ~ ': ' ~ each.content ~ '\\n' }}{% endfor %}"
    return f"{{% if zoo is not defined %}}{plain}{branches}{{% endif %}}"


REGEXES = {
    "a megabyte": "(ab|c)*" * 150_000,
    "240 000 characters": "(ab|c)*" * 34_000,
    "nested counts": "((a{1000}){1000}){1000}",
    "a count of 10^9": "a{1000000000}",
}
SCHEMAS: dict[str, Any] = {
    "10^9 items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "100 patterns at once": {
        "allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(100)]
    },
    "a constant of 240 000 characters": {"const": LONG},
    "the same behind a choice": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": LONG}}, "required": ["a", "b"]
    },
    "lists nested 100 000 deep": "[" * 100_000,
    "20 000 nots": '{"not":' * 20_000 + "{}" + "}" * 20_000,
    "references in a circle": {
        "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    },
    "references that double and must": {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{at}": {"type": "array", "items": {"$ref": f"#/$defs/a{at + 1}"}, "minItems": 2}
                  for at in range(40)} | {"a40": {}},
    },
    "900 names that may be left out": {
        "type": "object", "properties": {f"name_{at}": {"type": "integer"} for at in range(900)},
        "additionalProperties": False,
    },
    "a string of 10^9": {"type": "string", "minLength": 10**9},
}  # fmt: skip
GRAMMARS = {
    "10^9 letters": "root ::= x{1000}\nx ::= y{1000}\ny ::= z{1000}\nz ::= 'ab'",
    "one that doubles": "\n".join(
        ["root ::= r0", *(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(60)), "r60 ::= 'a'"]
    ),
    "left recursion": "root ::= root root | root | 'a' | ''",
    "10 000 rules": "\n".join(["root ::= r0", *(f"r{at} ::= 'a' | r{at + 1}" for at in range(9999)), "r9999 ::= 'b'"]),
    "three ways": "root ::= a b | b a | 'a'\na ::= a b | b b | 'a'\nb ::= a a | b a | root b | 'a'",
    "groups 5000 deep": "root ::= " + "(" * 5000 + "'a'" + ")" * 5000,
    "18 000 names": "root ::= " + " ".join(f"r{at}" for at in range(18_000)) + "".join(
        f"\nr{at} ::= 'a' root?" for at in range(9_000)),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheep:
    """What looks as if it cost much. parameter: that it is sent as; reason: why it costs little"""

    kind: Kind
    parameter: str
    source: Any
    reason: str


HARMLESS: dict[str, Sheep] = {
    "an exponential automaton": Sheep(
        kind="regex", parameter="regex", source="(a|b)*a(a|b){400}c",
        reason="states are made as a text comes to them, some for each character, so many at most for one token",
    ),
    "3000 of any": Sheep(
        kind="regex", parameter="regex", source="(.*a){60}.{3000}",
        reason="so are these; a text that comes to too many ends with an error, its sender's alone",
    ),
    "nested 28 deep": Sheep(
        kind="schema", parameter="json_schema", source=json.loads('{"items": ' * 28 + "{}" + "}" * 28),
        reason="each level is one rule more",
    ),
    "references that double": Sheep(
        kind="schema", parameter="json_schema", source={
            "$ref": "#/$defs/a0",
            "$defs": {
                f"a{at}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/a{at + 1}"} for name in "xy"}}
                for at in range(40)
            } | {"a40": {}},
        },
        reason="what is referred to is one rule, however often",
    ),
    "16 000 options": Sheep(
        kind="schema", parameter="json_schema", source={"enum": [f"{at:x}" * 3 for at in range(16_000)]},
        reason="codes of a catalogue are as many; they are one automaton without forks",
    ),
    "ambiguity": Sheep(
        kind="grammar", parameter="grammar", source="root ::= (a | b | c)*\na ::= 'x'*\nb ::= 'x'*\nc ::= 'x' a b",
        reason="nothing refers to itself, so that all of it is one regular expression, x*",
    ),
}  # fmt: skip
"""Answered: nobody else sees anything of them."""


def sheep(model: str, number: int) -> Iterator[Animal]:
    """All that is harmless, each of another digest for another number."""
    body = {"model": model, "prompt": "x", "max_tokens": 16, "temperature": 1, "seed": 1}
    for name, each in HARMLESS.items():
        source = {**each.source, "$comment": str(number)} if isinstance(each.source, dict) else each.source
        if each.kind == "regex":
            source += "z" * number
        if each.kind == "grammar":
            source += "\n" * number
        yield Animal(
            kind=each.kind, name=name, path="/v1/completions", body={**body, each.parameter: source}, is_hostile=False
        )


def animals(model: str, number: int) -> Iterator[Animal]:
    """All of them and what is harmless, each of another digest for another number, so that nothing is known of it
    beforehand."""
    completed = {"model": model, "prompt": "x", "max_tokens": 16, "temperature": 1, "seed": 1}
    path = "/v1/completions"
    for name, source in REGEXES.items():
        body = {**completed, "regex": source + "z" * number}
        yield Animal(kind="regex", name=name, path=path, body=body)
    for name, schema in SCHEMAS.items():
        told = schema + " " * number if isinstance(schema, str) else {**schema, "$comment": str(number)}
        yield Animal(kind="schema", name=name, path=path, body={**completed, "json_schema": told})
    for name, source in GRAMMARS.items():
        yield Animal(kind="grammar", name=name, path=path, body={**completed, "grammar": source + "\n" * number})
    yield from sheep(model, number)
    yield from _chats(model, number)
    yield from _images(completed, path, number)


def _chats(model: str, number: int) -> Iterator[Animal]:
    chat = {"model": model, "messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 1}
    path = "/v1/chat/completions"
    for name in TEMPLATES:
        asked = {"zoo": name, "zoo_count": 10**10}
        yield Animal(kind="template", name=name, path=path, body={**chat, "chat_template_kwargs": asked})
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    yield Animal(
        kind="chat", name="arguments nested 300 deep", path=path, body={**chat, "chat_template_kwargs": {"a": deep}}
    )
    many = [{"role": "user", "content": "<|end|>" * 500_000}]
    yield Animal(kind="chat", name="500 000 names of special tokens", path=path, body={**chat, "messages": many})


def _images(completed: Body, path: str, number: int) -> Iterator[Animal]:
    files = {name: make() for name, (make, _) in HOSTILE.items() if name not in OF_OTHER_BOUNDS}
    files |= {
        "26 million pixels": png(5200, 5000, BOMB),
        "a strip of 9000 x 1": file_of(PIL.Image.new("RGB", (9000, 1))),
        "half of a large JPEG": half_of(photograph((3000, 3000), number)),
        "25 million pixels of which most are missing": png(*LARGEST, BOMB),
    }
    for name, data in files.items():
        body = {**completed, "prompt": "<image>", "images": [encoded(data)]}
        yield Animal(kind="image", name=name, path=path, body=body)
    larger = file_of(photograph(LARGEST, number), "JPEG", quality=30)
    flat = file_of(PIL.Image.new("RGB", LARGEST, (number, 1, 2)), optimize=False)
    several = [encoded(file_of(photograph((1500, 1500), 100 * number + at), "JPEG")) for at in range(6)]
    for name, sent in (
        ("the largest JPEG", [encoded(larger)]),
        ("the largest PNG", [encoded(flat)]),
        ("6 of 1500 x 1500", several),
        ("32 small ones", [encoded(file_of(picture(1000 * number + at, (300, 300)))) for at in range(32)]),
    ):
        body = {**completed, "prompt": "<image>" * len(sent), "images": sent}
        yield Animal(kind="honest images", name=name, path=path, body=body, is_hostile=False)


def photograph(size: tuple[int, int], seed: int) -> PIL.Image.Image:
    """Noise that a JPEG keeps some of."""
    noise = PIL.Image.frombytes("RGB", (200, 200), random.Random(seed).randbytes(120_000))
    return noise.resize(size, PIL.Image.Resampling.BICUBIC)


def half_of(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()[: buffer.tell() // 2]
