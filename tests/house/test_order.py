"""The house is kept in order: door plates, docstrings, sizes, and nothing of the machine it was built on."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

from tests.house.sources import MODULES, REPOSITORY, nodes_of, text_of

MAX_LINES = 500
"""Of a module: a file is a subject, and small files with one importer make a house wide."""
MAX_TEST_LINES = 500
"""Of a file of tests: a table of examples is read from one end to the other."""
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
MAX_FUNCTION_LINES = 45
MAX_USUAL_FUNCTION_LINES = 20
"""Of nine functions of ten."""

OPEN_DOORS = {
    "serve_app/cli/__init__.py": ["from serve_app.cli.main import main as main"],
    "serve_app/lab/__init__.py": [
        "try:\n    from serve_app.lab.client import Client as Client\n"
        "    from serve_app.lab.magics import load_ipython_extension as load_ipython_extension\n"
        "except ModuleNotFoundError as missing:\n"
        '    raise ModuleNotFoundError(f"serve_app.lab needs {missing.name}, which comes with the extra: '
        "pip install -e '.[lab]'\", name=missing.name) from None"
    ],
}
"""Where the package's entry point leads, and what a notebook enters by."""

TEXT_SUFFIXES = {"", ".cfg", ".ipynb", ".jinja", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
UNTRACKED = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__", "build"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|work|Users|mnt|tmp/\w*ray\w*)/[\w.-]+")


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def module_of(file: Path) -> ast.Module:
    module = nodes_of(text_of(file))[0]
    assert isinstance(module, ast.Module)
    return module


def test_a_door_plate_is_a_docstring_and_nothing_else() -> None:
    plates = [each for each in MODULES if each.name == "__init__.py"]
    assert len(plates) > 10
    for file in plates:
        plate, *rest = module_of(file).body
        assert isinstance(plate, ast.Expr), file
        assert [ast.unparse(each) for each in rest] == OPEN_DOORS.get(name_of(file), []), file


def test_every_module_says_what_it_does() -> None:
    first_lines = {name_of(file): (ast.get_docstring(module_of(file)) or "").partition("\n")[0] for file in MODULES}
    assert {name: line for name, line in first_lines.items() if len(line) <= 15} == {}


def test_no_module_is_longer_than_can_be_read_at_once() -> None:
    assert longer_than(MAX_LINES, MODULES) == {}


def test_no_file_of_tests_is_longer_than_can_be_searched_by_eye() -> None:
    assert longer_than(MAX_TEST_LINES, TESTS) == {}


def longer_than(most: int, files: list[Path]) -> dict[str, int]:
    """Lines of those that have more, by name."""
    assert len(files) > 100, "all of them are looked at"
    counts = {name_of(file): len(text_of(file).splitlines()) for file in files}
    return {name: count for name, count in counts.items() if count > most}


def test_functions_are_short_nearly_all_of_them_and_none_is_long() -> None:
    functions = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{name_of(file)}: {node.name}")
        for file in MODULES
        for node in nodes_of(text_of(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [name for length, name in functions if length > MAX_FUNCTION_LINES] == []
    assert statistics.quantiles([length for length, _ in functions], n=10)[-1] <= MAX_USUAL_FUNCTION_LINES


REFUSALS = frozenset(
    {
        "InvalidRequest", "UnsupportedParameter", "ContextOverflow", "AdapterUnusable", "Forbidden", "NotFound",
        "ModelNotFound", "AdapterNotFound", "UnsupportedMediaType",
    }
)  # fmt: skip
"""Errors that are about a parameter, where they name one."""


def freely_worded(source: str) -> list[int]:
    """Lines that make a refusal of a parameter in words of their own."""
    return [
        node.lineno
        for node in nodes_of(source)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in REFUSALS
        and (len(node.args) > 1 and not (isinstance(node.args[1], ast.Constant) and node.args[1].value is None))
    ]


def test_every_refusal_of_a_parameter_has_the_one_form() -> None:
    found = {name_of(file): freely_worded(text_of(file)) for file in MODULES}
    assert {name: lines for name, lines in found.items() if lines} == {}, "say it by `refusing`"


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('raise InvalidRequest("`n` is odd", "n")', True),
        ("raise ModelNotFound(message, spelled)", True),
        ('raise InvalidRequest("The body is no object.")', False),
        ('raise InvalidRequest("Too long.", None, {"most": 5})', False),
        ('raise InvalidRequest.refusing("n", must="be even", found="1")', False),
    ],
)
def test_a_refusal_in_words_of_its_own_is_told_from_others(line: str, is_found: bool) -> None:
    assert bool(freely_worded(line)) is is_found


def text_files() -> list[Path]:
    return sorted(
        file
        for file in REPOSITORY.rglob("*")
        if file.is_file()
        and file.suffix in TEXT_SUFFIXES
        and not any(part in UNTRACKED or part.endswith(".egg-info") for part in file.relative_to(REPOSITORY).parts)
    )


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    found = [
        f"{name_of(file)}:{number}: {match.group()}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("path = /" + "home/alice/models", True),
        ("see /" + "root/.cache", True),
        ("https://example.org/home/page", False),
        ("adapters/demo", False),
    ],
)
def test_a_machine_path_is_told_from_an_address(line: str, is_found: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) is is_found
