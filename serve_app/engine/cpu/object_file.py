"""Brings the machine code of an object file into this process: ELF for x86-64, of functions that call nothing else."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

# ELF-64, "System V Application Binary Interface", and its supplement for AMD64
MAGIC = b"\x7fELF\x02\x01"
X86_64 = 62
SYMTAB, RELA = 2, 4
PC32, PLT32 = 2, 4
UNDEFINED, LEAST_RESERVED = 0, 0xFF00
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
PROT_READ, PROT_EXEC = 1, 4


class NotLoadable(RuntimeError):
    """An object file has something that is not known here."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


class Loaded:
    """Machine code of one object file; it lasts as long as this object.

    The file lies in memory as it is: what its code reads is as far from it there as in the file.
    """

    def __init__(self, image: bytes) -> None:
        """Raises NotLoadable, and OSError."""
        if len(image) < HEADER.size or image[: len(MAGIC)] != MAGIC or HEADER.unpack_from(image)[2] != X86_64:
            raise NotLoadable("no object file of x86-64")
        self._image = image
        self._sections = self._read_sections()
        self._memory = mmap.mmap(-1, len(image), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[:] = image
        for section in self._sections:
            if section.kind == RELA:
                self._relocate(section)
        self._begin = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(self._begin), ctypes.c_size_t(len(image)), PROT_READ | PROT_EXEC
        ):
            raise NotLoadable(f"memory can't be made executable (errno {ctypes.get_errno()})")

    def address_of(self, name: str) -> int:
        """Of a function. Raises NotLoadable."""
        for section in self._sections:
            if section.kind != SYMTAB:
                continue
            names = self._sections[section.link].offset
            for at in range(section.size // SYMBOL.size):
                begin, *_ = SYMBOL.unpack_from(self._image, section.offset + at * SYMBOL.size)
                end = self._image.index(b"\0", names + begin)
                if self._image[names + begin : end].decode() == name:
                    return self._begin + self._place_of(section, at)
        raise NotLoadable(f"it has no {name}")

    def _read_sections(self) -> list[_Section]:
        *_, begin, _flags, _size, _, _, size, count, _names = HEADER.unpack_from(self._image)
        found = [_Section(*SECTION.unpack_from(self._image, begin + at * size)) for at in range(count)]
        if any(each.align > mmap.PAGESIZE or (each.align and each.offset % each.align) for each in found):
            raise NotLoadable("its sections do not lie in the file as they have to in memory")
        return found

    def _relocate(self, section: _Section) -> None:
        code, symbols = self._sections[section.info], self._sections[section.link]
        for offset, kind, symbol, addend in self._relocations(section):
            if kind not in (PC32, PLT32):
                raise NotLoadable(f"relocation {kind}")
            place = code.offset + offset
            struct.pack_into("<i", self._memory, place, self._place_of(symbols, symbol) + addend - place)

    def _relocations(self, section: _Section) -> Iterator[tuple[int, int, int, int]]:
        for at in range(section.size // RELOCATION.size):
            offset, info, addend = RELOCATION.unpack_from(self._image, section.offset + at * RELOCATION.size)
            yield offset, info & 0xFFFFFFFF, info >> 32, addend

    def _place_of(self, symbols: _Section, number: int) -> int:
        """Of a symbol, in the file."""
        name, _, _, section, value, _ = SYMBOL.unpack_from(self._image, symbols.offset + number * SYMBOL.size)
        if section == UNDEFINED or section >= LEAST_RESERVED:
            names = self._sections[symbols.link].offset + name
            unknown = self._image[names : self._image.index(b"\0", names)].decode()
            raise NotLoadable(f"it calls {unknown or 'what is not in it'}")
        place: int = self._sections[section].offset + value
        return place
