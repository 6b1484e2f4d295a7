"""Kernels are compiled in this process, called by one thread or several, and refused with LLVM's own reason."""

from __future__ import annotations

import ctypes

import pytest

from serve_app.kernels.cpu.compiling import Kernel, tried
from serve_app.kernels.openmp import libgomp

pytestmark = pytest.mark.skipif(libgomp() is None, reason="needs torch's libgomp")

TAKE_ITEMS = """
define void @note(ptr %given) {
  %counter.address = load i64, ptr %given
  %counter = inttoptr i64 %counter.address to ptr
  %at = getelementptr i64, ptr %given, i64 1
  %target.address = load i64, ptr %at
  %target = inttoptr i64 %target.address to ptr
  br label %again
again:
  %item = atomicrmw add ptr %counter, i64 1 monotonic
  %is = icmp slt i64 %item, 100
  br i1 %is, label %go, label %done
go:
  %place = getelementptr i64, ptr %target, i64 %item
  store i64 %item, ptr %place
  br label %again
done:
  ret void
}
"""


@pytest.mark.parametrize("is_short", [True, False])
def test_every_item_is_taken_once_by_one_thread_or_several(is_short: bool) -> None:
    target = (ctypes.c_int64 * 100)(*[-1] * 100)
    Kernel(TAKE_ITEMS, "note")(ctypes.addressof(target), is_short=is_short)
    assert list(target) == list(range(100))


def test_what_llvm_refuses_is_told_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match="parsing error"):
        Kernel("no module", "note")


def test_kernels_that_cannot_be_made_or_are_wrong_leave_it_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    assert tried("sums", lambda: Kernel("no module", "note"), lambda _: True) is None
    assert "torch computes sums: no kernel could be made (LLVM IR parsing error" in caplog.text
    assert tried("sums", lambda: Kernel(TAKE_ITEMS, "note"), lambda _: False) is None
    assert "torch computes sums: the kernel is wrong" in caplog.text
