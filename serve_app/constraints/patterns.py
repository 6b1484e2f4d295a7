"""Regular expressions that common tools write into schemas and that the library does not know, in words that it does.

Look-around is what it lacks. Each is matched by its very text, and stands for the same language.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LOCAL = r"[A-Za-z0-9_'+\-]"

KNOWN: Mapping[str, str] = MappingProxyType(
    {
        # pydantic, of a Decimal: at least one digit, around at most one point
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
        # zod 4, of z.email(): no point first, none beside another
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
            rf"^({_LOCAL}+\.)*{_LOCAL}*[A-Za-z0-9_+\-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{{2,}}$"
        ),
        # zod 3, of z.string().email()
        r"^(?!\.)(?!.*\.\.)([A-Z0-9_'+\-\.]*)[A-Z0-9_+-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$": (
            r"^([A-Z0-9_'+\-]+\.)*[A-Z0-9_'+\-]*[A-Z0-9_+\-]@([A-Z0-9][A-Z0-9\-]*\.)+[A-Z]{2,}$"
        ),
        # zod 4, of z.iso.duration(): weeks alone, or a part of a date or a time at least
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
            r"^P(\d+W|(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)(T{time})?|T{time})$".replace(
                "{time}", r"(\d+H(\d+M)?(\d+([.,]\d+)?S)?|\d+M(\d+([.,]\d+)?S)?|\d+([.,]\d+)?S)"
            )
        ),
    }
)
