"""The C library's allocator: what a step freed is there for the next one."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serve_app.engine.decoder.memory import FilePages, Leftovers

FAULTS = """
import ctypes, resource, sys
from serve_app.engine.decoder.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "keeps":
    assert keep_freed_memory()
def step():
    blocks = [libc.malloc(1 << 20) for _ in range(20)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in reversed(blocks):
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_STEP = 20 * 256


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_a_step_freed_is_not_asked_of_the_kernel_again() -> None:
    def faults(how: str) -> int:
        command = [sys.executable, "-c", FAULTS, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("does not keep") > 10 * PAGES_OF_A_STEP
    assert faults("keeps") < PAGES_OF_A_STEP


GIVEN_BACK = """
import ctypes
from serve_app.engine.decoder.memory import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(open("/proc/self/statm").read().split()[1])
read, kept = [], []
for _ in range(40):  # what is read, and between it what stays: too large for holes elsewhere, or nothing lay between
    read.append(libc.malloc(1 << 20))
    ctypes.memset(read[-1], 1, 1 << 20)
    kept.append(libc.malloc(1 << 18))
for block in read:
    libc.free(block)
before = resident()
assert give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_loading_freed_between_what_stays_is_given_back() -> None:
    command = [sys.executable, "-c", GIVEN_BACK]
    num_pages = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert num_pages > 35 * 256


def resident_kib(address: int) -> int:
    """Of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(each.split()[1]) for each in lines if each.startswith("Rss:"))
    raise AssertionError("it is not mapped")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell of mappings")
def test_pages_of_a_file_are_given_back_and_read_again_and_no_others(tmp_path: Path) -> None:
    path, size = tmp_path / "weights.safetensors", 64 * mmap.PAGESIZE
    torch.arange(size, dtype=torch.int16).to(torch.uint8).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=size, dtype=torch.uint8)
    others = torch.ones(size, dtype=torch.uint8)
    content = mapped.clone()
    pages = FilePages.of_this_process(".safetensors")
    before = resident_kib(mapped.data_ptr())
    assert pages.give_back(mapped.data_ptr() + mmap.PAGESIZE // 2, size - mmap.PAGESIZE)
    page_kib = mmap.PAGESIZE // 1024
    assert (before, resident_kib(mapped.data_ptr())) == (64 * page_kib, 2 * page_kib), "the halves of two pages stay"
    assert torch.equal(mapped, content)
    assert not pages.give_back(others.data_ptr(), size)
    assert bool((others == 1).all())


KERNELS = """
import sys
import torch
from serve_app.engine.decoder.memory import give_back_freed_memory, settle_memory
if sys.argv[1] == "few":
    settle_memory()
torch.set_num_threads(1)
def resident():
    give_back_freed_memory()
    return int(open("/proc/self/statm").read().split()[1])
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(512, 1024), 8)
def compute(rows):
    x = torch.ones(rows, 1024)
    return float(torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")[-1, -1])
with torch.inference_mode():
    assert compute(3) == 1024
    before = resident()
    assert all(compute(rows) == 1024 for rows in range(4, 404))
    print((resident() - before) // 256)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN")
def test_products_of_many_shapes_do_not_take_memory_for_good() -> None:
    def taken_mib(how: str) -> int:
        command = [sys.executable, "-c", KERNELS, how]
        plain = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_CAPACITY")}
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=plain).stdout)

    few, many = taken_mib("few"), taken_mib("as many as there are")
    assert few < 20
    assert few <= many, "how much there would be depends on the CPU: 230 where this was written"


def test_leftovers_are_given_back_at_rest_soon_and_at_work_now_and_then() -> None:
    now = 100.0
    leftovers = Leftovers(lambda: now)
    seen = []
    for at, is_idle in ((100.5, True), (101.1, False), (101.2, True), (102.1, True), (106.0, False), (106.3, False)):
        now = at
        if leftovers.look(is_idle=is_idle):
            seen.append(at)
    assert seen == [101.2, 106.3]
