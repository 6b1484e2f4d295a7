"""What people read is short: sentences of the documents, and the first lines of docstrings."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import median

import pytest

from tests.house.sources import MODULES, REPOSITORY, nodes_of, text_of

MAX_MEDIAN_WORDS = 15
MAX_LONG_SHARE = 0.05
"""Of a document's sentences, those that may have more than `MAX_WORDS`."""
MAX_WORDS = 25
MAX_FIRST_LINE_WORDS = 25
DOCUMENTS = sorted([*(REPOSITORY / "docs").rglob("*.md"), *REPOSITORY.glob("*.md")])
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- generated.*?<!-- end -->", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"(\[*])")
CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def sentences_of(text: str) -> list[str]:
    """Return the sentences of a document's prose and table cells, without code, what is generated, and headings."""
    text = GENERATED.sub("", FENCE.sub("", text))
    text = LINK.sub(r"\1", CODE.sub("X", text))
    paragraphs = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.)\s)|\n(?=\|)", text):
        if block.lstrip().startswith(("#", "<!--", "---")):
            continue
        cells = block.strip().strip("|").split(" | ") if block.lstrip().startswith("|") else [block]
        paragraphs += [" ".join(cell.replace("**", "").split()) for cell in cells]
    found = (each.strip() for paragraph in paragraphs for each in SENTENCE_END.split(paragraph))
    return [each for each in found if len(each.split()) > 2]


def words(sentence: str) -> int:
    return len([word for word in sentence.split() if re.search(r"\w", word)])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(REPOSITORY)))
def test_the_sentences_of_a_document_are_short(document: Path) -> None:
    lengths = {sentence: words(sentence) for sentence in sentences_of(document.read_text(encoding="utf-8"))}
    if not lengths:
        return
    long = [sentence for sentence, length in lengths.items() if length > MAX_WORDS]
    assert median(lengths.values()) <= MAX_MEDIAN_WORDS
    assert len(long) <= MAX_LONG_SHARE * len(lengths), "\n".join(long[:20])


def test_the_first_line_of_a_docstring_is_one_short_phrase() -> None:
    found = []
    for file in MODULES:
        for node in nodes_of(text_of(file)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n\n")[0]
                if words(first.split(". ")[0]) > MAX_FIRST_LINE_WORDS:
                    found.append(f"{file.relative_to(REPOSITORY)}: {first}")
    assert found == []
