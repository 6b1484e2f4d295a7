"""Writes docs/models.md from the tables: `python -m tests.families.page`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.families.families import NOT_ALONE, REFUSED, SERVED, Family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Models

Which families of decoders are served. A family is transformers' `model_type`, as `config.json` names it. This page is
written from the tables in `tests/families/families.py` by `python -m tests.families.page`; a test checks that it is so.
"""
SERVED_HEAD = """
## Served

Small random models of these families, made by `tests/families/making.py`, give in float32 exactly the tokens of
transformers' `generate`: prompts of many lengths computed together, cut into chunks, continued from cached prefixes and
forked into two samples. What is named in brackets is tested besides the plain form; after "only", in its place.

"""
REFUSED_HEAD = """
## Refused

Loading ends with `ModelNotSupported` and this reason.

"""


def render() -> str:
    """The page's text."""
    reasons: dict[str, list[Family]] = {}
    for refusal in REFUSED:
        reasons.setdefault(refusal.reason, []).append(refusal.family)
    return "".join(
        [
            HEAD,
            SERVED_HEAD,
            *(f"- {line}\n" for line in gather(SERVED)),
            REFUSED_HEAD,
            *table("reason", reasons),
            *(f"\n`{name}` is no model by itself: it {why}.\n" for name, why in NOT_ALONE.items()),
        ]
    )


def gather(families: Iterable[Family]) -> list[str]:
    """One line per name, its variants in brackets."""
    variants: dict[str, list[str]] = {}
    for family in families:
        variants.setdefault(family.name, []).append(family.variant)
    return [f"`{name}`{_brackets(listed)}" for name, listed in sorted(variants.items())]


def _brackets(variants: list[str]) -> str:
    named = ", ".join(filter(None, variants))
    if not named:
        return ""
    return f" ({named})" if "" in variants else f" (only {named})"


def table(heading: str, rows: dict[str, list[Family]]) -> list[str]:
    lines = [f"| {heading} | families |\n", "|---|---|\n"]
    return lines + [f"| {name} | {', '.join(gather(rows[name]))} |\n" for name in sorted(rows)]


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(), encoding="utf-8")
