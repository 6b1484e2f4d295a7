"""What no line of the service may do, as others were broken by it."""

from __future__ import annotations

import ast

import pytest

from tests.house.lock import LEFT_OUT, LOCK, pins
from tests.house.sources import MODULES, PACKAGE, REPOSITORY, nodes_of, text_of

PICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
PACKS = "deployments/packing.py"
"""Frames between replicas and routers of ours, inside Ray, which carries pickled objects itself."""
CODE_OF_STRANGERS = {"eval", "exec", "compile", "__import__"}
FETCHING = {"torch.load", "hf_hub_download", "snapshot_download"}
SWITCHES = {"trust_remote_code", "local_files_only"}


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def test_nothing_is_unpickled_but_what_replicas_send_routers_within_ray() -> None:
    """Pickled objects over a socket and in a tool that replays requests ran code of whoever sent them: SGLang,
    CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-7301.
    """
    found = set()
    for file in MODULES:
        for node in nodes_of(text_of(file)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if PICKLING & {each.split(".")[0] for each in names}:
                found.add(str(file.relative_to(PACKAGE)))
    assert found == {PACKS}


def test_no_library_is_let_fetch_a_model_or_run_its_code() -> None:
    """A config ran code although that was said to be off, and weights were pickles: transformers, CVE-2026-4372,
    CVE-2026-5241, CVE-2026-1839; torch, CVE-2025-32434; adapters in `.bin` of PEFT.
    """
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file in MODULES
        for node in nodes_of(text_of(file))
        if isinstance(node, ast.Call) and not is_harmless(node, is_of_the_demo="demo" in file.parts)
    ]
    assert found == []


def is_harmless(call: ast.Call, *, is_of_the_demo: bool) -> bool:
    given = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg in SWITCHES}
    name = name_of(call)
    if given.get("trust_remote_code", "False") != "False" or name in FETCHING | CODE_OF_STRANGERS:
        return False
    return is_of_the_demo or not name.endswith(".from_pretrained") or given.get("local_files_only") == "True"


@pytest.mark.parametrize(
    ("source", "is_fine"),
    [
        ("Model.from_pretrained(path, local_files_only=True)", True),
        ("Model.from_pretrained(path)", False),
        ("Model.from_pretrained(path, local_files_only=True, trust_remote_code=True)", False),
        ("torch.load(path)", False),
        ("eval(text)", False),
        ("model.eval()", True),
    ],
)
def test_a_call_that_may_fetch_or_run_is_told_from_others(source: str, is_fine: bool) -> None:
    (call,) = (node for node in nodes_of(source) if isinstance(node, ast.Call))
    assert is_harmless(call, is_of_the_demo=False) is is_fine


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
