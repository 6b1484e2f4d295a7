"""Shows a client's value back to it in an error message, shortened."""

from __future__ import annotations

import json

MAX_SHOWN_CHARS = 60
MAX_SHOWN_BITS = 200


def shown(value: object) -> str:
    """The value as JSON where it is short, otherwise its beginning or its size."""
    match value:
        case bool() | None:
            return json.dumps(value)
        case int() if value.bit_length() > MAX_SHOWN_BITS:
            return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"
        case str() if len(value) > MAX_SHOWN_CHARS:
            return f"{json.dumps(value[:MAX_SHOWN_CHARS])}… (a string of {len(value)} characters)"
        case list() if len(value) > 4:
            return f"a list of {len(value)} elements"
        case dict() if len(value) > 4:
            return f"an object of {len(value)} members"
        case list():
            return _shortened("[" + ", ".join(_brief(element) for element in value) + "]")
        case dict():
            members = (f"{json.dumps(str(key)[:20])}: {_brief(member)}" for key, member in value.items())
            return _shortened("{" + ", ".join(members) + "}")
        case _:
            return _shortened(json.dumps(value))


def _brief(value: object) -> str:
    """Like `shown`, but a container inside a container is only named."""
    match value:
        case list():
            return "[…]" if value else "[]"
        case dict():
            return "{…}" if value else "{}"
        case _:
            return shown(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 2 * MAX_SHOWN_CHARS else text[: 2 * MAX_SHOWN_CHARS] + "…"
