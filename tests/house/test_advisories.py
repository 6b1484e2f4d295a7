"""What no line of the service may do, as others were broken by it."""

from __future__ import annotations

import ast

import pytest

from tests.house.lock import LEFT_OUT, LOCK, pins
from tests.house.mentions import mentions, whole_name
from tests.house.sources import MODULES, PACKAGE, REPOSITORY, nodes_of, text_of

PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle"}
UNPICKLING = {"torch.load", "torch.serialization.load", "torch.jit.load", "torch.package.PackageImporter"}
UNPICKLING |= {"pandas.read_pickle", "numpy.lib.format.read_array", "ray.cloudpickle"}
PACKS = "deployments/transport.py"
"""Frames between replicas and routers of ours, inside Ray, which carries pickled objects itself."""
PIPES = {
    "sandbox/child.py": "what a child is given once, by the process that started it, before anything of a stranger's",
    "engine/tensor_parallel/workers.py": "answers of followers, each of which it has started itself",
    "engine/tensor_parallel/worker.py": "orders of the first shard, which has started it",
}
"""Who unpickles what comes over a pipe, and from whom: pairs of sockets that a child inherits, without an address."""
ENDS_OF_PIPES = "multiprocessing.connection.Connection"
CODE_OF_STRANGERS = {"eval", "exec", "compile", "__import__"}
FETCHING = {"hf_hub_download", "snapshot_download", "torch.hub"}
SWITCHES = {"trust_remote_code", "local_files_only", "allow_pickle"}


def harms_of(source: str) -> list[str]:
    """What of a file may fetch something, or run what somebody else wrote; named or called, under any name."""
    found = [ast.unparse(node) for node, name in mentions(source) if is_harmful(name)]
    calls = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    return found + [ast.unparse(each) for each in calls if not is_harmless(each, source)]


def is_harmful(name: str) -> bool:
    """name: whole"""
    parts = name.removeprefix("builtins.").split(".")
    wholes = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(wholes & (CODE_OF_STRANGERS | UNPICKLING | FETCHING) or parts[-1] in FETCHING)


def is_harmless(call: ast.Call, source: str) -> bool:
    """As far as it is told by a call's switches."""
    given = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg in SWITCHES}
    if given.get("trust_remote_code", "False") != "False" or given.get("allow_pickle", "False") != "False":
        return False
    if whole_name(call.func, source) == "numpy.load" and (len(call.args) > 2 or has_more(call)):
        return False  # what is not spelled may allow it
    is_a_model = ast.unparse(call.func).endswith(".from_pretrained")
    return not is_a_model or given.get("local_files_only") == "True"


def has_more(call: ast.Call) -> bool:
    """Whether it is given keywords that are not spelled there."""
    return any(each.arg is None for each in call.keywords)


def unpicklings_of(source: str) -> set[str]:
    """How a file makes objects of pickled bytes: by a module for that, a function of a library, the end of a pipe."""
    names = {name for _, name in mentions(source)}
    modules = {name for name in names if PICKLING & set(name.split("."))}
    others = {name for name in names if name.startswith("multiprocessing") and not ENDS_OF_PIPES.startswith(name)}
    received = {
        ast.unparse(node)
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "recv"
        if not node.args and not node.keywords  # a socket's wants to be told how much
    }
    return modules | names & UNPICKLING | others | received


def test_nothing_is_unpickled_but_what_our_own_processes_send_each_other() -> None:
    """Pickled objects over a socket and in a tool that replays requests ran code of whoever sent them: SGLang,
    CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-7301.
    """
    found = {str(file.relative_to(PACKAGE)): unpicklings_of(text_of(file)) for file in MODULES}
    found = {name: ways for name, ways in found.items() if ways}
    assert found.keys() == {PACKS, *PIPES}
    assert all(way.endswith(".recv()") for name in PIPES for way in found[name]), "a pipe, and nothing besides"
    assert {way.partition(".")[0] for way in found[PACKS]} == {"pickle"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import ray.cloudpickle as c",
        "from ray import cloudpickle",
        "from torch import load as read; read(p)",
        "import pandas as pd; pd.read_pickle(p)",
        "from multiprocessing.connection import Connection; Connection(3).recv()",
        "from multiprocessing.connection import Listener",
        "from multiprocessing.managers import BaseManager",
        "import multiprocessing; multiprocessing.Queue()",
    ],
)
def test_every_way_of_unpickling_is_seen(source: str) -> None:
    assert unpicklings_of(source)


@pytest.mark.parametrize(
    "source",
    ["import json; json.loads(p)", "sock.recv(1)", "from multiprocessing.connection import Connection; c.recv_bytes()"],
)
def test_reading_bytes_is_no_unpickling(source: str) -> None:
    assert unpicklings_of(source) == set()


def test_no_library_is_let_fetch_a_model_or_run_its_code() -> None:
    """A config ran code although that was said to be off, and weights were pickles: transformers, CVE-2026-4372,
    CVE-2026-5241, CVE-2026-1839; torch, CVE-2025-32434; adapters in `.bin` of PEFT.
    """
    found = {str(file.relative_to(PACKAGE)): harms_of(text_of(file)) for file in MODULES}
    assert {name: harms for name, harms in found.items() if harms} == {}


@pytest.mark.parametrize(
    ("source", "is_fine"),
    [
        ("Model.from_pretrained(path, local_files_only=True)", True),
        ("Model.from_pretrained(path)", False),
        ("Model.from_pretrained(path, local_files_only=True, trust_remote_code=True)", False),
        ("import torch; torch.load(path)", False),
        ("from torch import load; load(path)", False),
        ("from torch import load as read", False),
        ("import torch as t; read = t.load; read(path)", False),
        ("import torch; getattr(torch, 'load')(path)", False),
        ("import torch; getattr(torch, name)", True),
        ("from torch.serialization import load", False),
        ("import torch.hub", False),
        ("from safetensors.torch import load; load(data)", True),
        ("import numpy; numpy.load(path, allow_pickle=True)", False),
        ("import numpy as np; np.load(path, **options)", False),
        ("import numpy; numpy.load(path, allow_pickle=False)", True),
        ("import numpy; numpy.load(path)", True),
        ("from huggingface_hub import snapshot_download as get; get(name)", False),
        ("import huggingface_hub; huggingface_hub.hf_hub_download(name)", False),
        ("eval(text)", False),
        ("import builtins; builtins.exec(text)", False),
        ("run = exec", False),
        ("model.eval()", True),
        ("import re; re.compile(text)", True),
    ],
)
def test_what_may_fetch_or_run_is_told_from_the_rest(source: str, is_fine: bool) -> None:
    assert (harms_of(source) == []) is is_fine


def test_what_is_pinned_is_locked_with_digests() -> None:
    """A package was exchanged for one with another content: LiteLLM 1.82.7 and 1.82.8 on PyPI."""
    wanted = dict(pins((REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()))
    locked = {}
    head = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert all(f"{name} is not here" in "\n".join(head) for name in LEFT_OUT)
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        pin, sign, digest = line.partition(" --hash=sha256:")
        if sign:
            name, version = pin.split("==")
            assert len(bytes.fromhex(digest)) == 32
            locked[canonical(name)] = version
    assert locked == {canonical(name): version for name, version in wanted.items() if name not in LEFT_OUT}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
