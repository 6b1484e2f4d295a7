"""Writes the generated sections of the documents anew: `python -m tests.docs.write`."""

from __future__ import annotations

from tests.docs.markdown import filled
from tests.docs.sections import PAGES, SECTIONS

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
