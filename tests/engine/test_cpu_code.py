"""Machine code that another process has made computes what its instructions say, or is not taken at all."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serve_app.engine.cpu import compiler, compiling, likeliest_kernel
from serve_app.engine.cpu.compiling import compiled
from serve_app.engine.cpu.object_file import RELOCATION, Loaded, NotLoadable

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="elsewhere code is made in the process"
)

# the constants lie in a section of their own; `entry` calls `scaled`, and reads a table
INSTRUCTIONS = """
@table = internal constant [4 x double] [double 0.5, double 1.5, double -2.25, double 1.0e300]
define internal double @scaled(double %x) noinline {
  %y = fmul double %x, 3.125
  ret double %y
}
define double @entry(i64 %at, double %x) {
  %place = getelementptr [4 x double], ptr @table, i64 0, i64 %at
  %found = load double, ptr %place
  %scaled = call double @scaled(double %x)
  %sum = fadd double %found, %scaled
  ret double %sum
}
define i64 @other(i64 %x) {
  %y = add i64 %x, 1
  ret i64 %y
}
"""
CALLS_OTHERS = """
declare double @cbrt(double)
define double @entry(double %x) {
  %y = call double @cbrt(double %x)
  ret double %y
}
"""


@pytest.fixture(scope="module")
def image() -> bytes:
    """An object file, made where LLVM may stay."""
    return made(INSTRUCTIONS)


def made(instructions: str) -> bytes:
    makes = "sys.stdout.buffer.write(object_file(sys.stdin.read()))"
    program = f"import sys; from serve_app.engine.cpu.llvm import object_file; {makes}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, input=instructions.encode(), capture_output=True, check=True).stdout


def test_functions_read_their_constants_and_call_each_other(image: bytes) -> None:
    code = Loaded(image)
    entry = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64, ctypes.c_double)(code.address_of("entry"))
    assert [entry(at, 2.0) for at in range(4)] == [6.75, 7.75, 4.0, 1e300]
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address_of("other"))(41) == 42


def test_code_can_be_executed_and_not_written(image: bytes) -> None:
    code = Loaded(image)
    address = code.address_of("entry")
    rights = [
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)
    ]
    assert rights == ["r-xp"]


def test_a_function_that_is_not_there_is_named(image: bytes) -> None:
    with pytest.raises(NotLoadable, match="has no third"):
        Loaded(image).address_of("third")


def test_code_that_calls_what_is_not_in_it_is_not_taken() -> None:
    with pytest.raises(NotLoadable, match="cbrt"):
        Loaded(made(CALLS_OTHERS))


def test_a_relocation_that_is_not_known_is_not_guessed(image: bytes) -> None:
    known = next(each for each in Loaded(image)._sections if each.kind == 4)
    offset, info, addend = RELOCATION.unpack_from(image, known.offset)
    changed = bytearray(image)
    RELOCATION.pack_into(changed, known.offset, offset, info & ~0xFFFFFFFF | 9, addend)
    with pytest.raises(NotLoadable, match="relocation 9"):
        Loaded(bytes(changed))


@pytest.mark.parametrize("cut", [b"", b"MZ and more", b"\x7fELF\x02\x01" + bytes(100)])
def test_what_is_no_object_file_of_this_machine_is_refused(cut: bytes) -> None:
    with pytest.raises(NotLoadable):
        Loaded(cut)


def test_what_llvm_refuses_is_told_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match="parsing error"):
        compiled(likeliest_kernel.emit, width=0)  # vectors of no numbers


def test_what_cannot_be_written_is_told_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match="no_such_number"):
        compiled(likeliest_kernel.emit, no_such_number=1)


def test_what_lies_in_the_working_directory_is_not_taken_for_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as Ray has it
    assert compiled(likeliest_kernel.emit, width=8).address_of(likeliest_kernel.LIKELIEST)


def test_the_process_that_asks_does_not_load_llvm() -> None:
    asks = (
        "import torch; from serve_app.engine.cpu.rows import rows_kernel;"
        " assert rows_kernel(2, 32, torch.bfloat16); print('libllvmlite' in open('/proc/self/maps').read())"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_pairs_of_bfloat16_are_multiplied_in_wide_vectors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for capability, expected in (("AVX512", True), ("AVX2", False)):  # torch may be told to do without
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda told=capability: told)
        assert compiling.Machine.here().has_pairs is expected


def test_every_kernel_is_written_by_that_process() -> None:
    written = {name.rpartition(".")[2] for name in compiler.WRITERS}
    assert written == {file.stem for file in Path(compiler.__file__).parent.glob("*_kernel*.py")}
