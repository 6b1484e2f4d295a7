"""What no line of the service may do, as others were broken by it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.lock import LEFT_OUT, LOCK, REPOSITORY, pins

PACKAGE = REPOSITORY / "serve_app"
MODULES = sorted(PACKAGE.rglob("*.py"))
PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PACKS = "deployments/packing.py"
"""Frames between replicas and routers of ours, inside Ray, which carries pickled objects itself."""
CODE_OF_STRANGERS = {"eval", "exec", "compile", "__import__"}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_nothing_is_unpickled_but_what_replicas_send_routers_within_ray() -> None:
    """Pickled objects over a socket and in a tool that replays requests ran code of whoever sent them: SGLang,
    CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-7301.
    """
    found = set()
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if PICKLING & {each.split(".")[0] for each in names}:
                found.add(str(file.relative_to(PACKAGE)))
    assert found == {PACKS}


@pytest.mark.parametrize("file", MODULES, ids=lambda each: str(each.relative_to(PACKAGE)))
def test_no_library_is_let_fetch_a_model_or_run_its_code(file: Path) -> None:
    """A config ran code although that was said to be off, and weights were pickles: transformers, CVE-2026-4372,
    CVE-2026-5241, CVE-2026-1839; torch, CVE-2025-32434; adapters in `.bin` of PEFT.
    """
    for call in calls(ast.parse(file.read_text(encoding="utf-8"))):
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert given.get("trust_remote_code", "False") == "False"
        assert name_of(call) not in {"torch.load", "hf_hub_download", "snapshot_download"}
        assert name_of(call) not in CODE_OF_STRANGERS
        if name_of(call).endswith(".from_pretrained"):
            assert given.get("local_files_only") == "True" or "demo" in file.parts, ast.unparse(call)


def test_what_is_pinned_is_locked_with_digests() -> None:
    """A package was exchanged for one with another content: LiteLLM 1.82.7 and 1.82.8 on PyPI."""
    wanted = dict(pins((REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()))
    locked = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        pin, sign, digest = line.partition(" --hash=sha256:")
        if sign:
            name, version = pin.split("==")
            assert len(bytes.fromhex(digest)) == 32
            locked[canonical(name)] = version
    assert locked == {canonical(name): version for name, version in wanted.items() if name not in LEFT_OUT}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
