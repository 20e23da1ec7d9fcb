"""Reader of GGUF v2 and v3 files: metadata is decoded on access, tensors are memory-mapped.

The layout follows the GGUF specification in ggml (docs/gguf.md): magic, version, counts, key-value
pairs, tensor table, padding to `general.alignment`, tensor data. Only little-endian files are read.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError
from cpuserve.loader.mapped import AnyFile, MappedFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Types that llama.cpp has removed. The types from 31 on were Q4_0
# and IQ4_NL with interleaved blocks for some CPUs. bitnet.cpp uses the number 36 for another type.
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
# Types of ik_llama.cpp: each text lists types with consecutive numbers,
# from the number of the first type on. TENSOR_TYPES has 142 and 143, types of Prism's fork.
_IK = {
    97: "Q8_0_X4 Q8_1_X4 Q8_2_X4",
    133: "Q6_0 IQ1_BN IQ2_BN Q8_K64 IQ2_K IQ3_K IQ4_K IQ5_K IQ6_K",
    144: "IQ4_KS IQ2_KS IQ4_KSS Q8_K16 Q8_K32 Q8_KR8 Q8_K128 Q8_KV IQ5_KS",
    153: "IQ2_KT IQ3_KT IQ4_KT IQ3_KS IQ2_KL IQ1_KT",
}
_IK_NAMES = {
    first + i: name for first, names in _IK.items() for i, name in enumerate(names.split())
}
_FORKS = range(97, 159)
_REPACKED = range(202, 400)


def foreign_type(number: int) -> str:
    """Return a text about the type ("IQ5_K, a type of ik_llama.cpp"); "" if it is unknown."""
    if number in _REMOVED:
        bitnet = " (or I2_S of bitnet.cpp)" if number == 36 else ""
        return f"{_REMOVED[number]}, a type that llama.cpp removed{bitnet}"
    if number in _IK_NAMES:
        return f"{_IK_NAMES[number]}, a type of ik_llama.cpp"
    if number in _FORKS and number not in TENSOR_TYPES:
        return "a type of ik_llama.cpp or another fork of llama.cpp"
    return "a repacked type of ik_llama.cpp (_R4, _R8 or _R16)" if number in _REPACKED else ""


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64
MAX_DIMS = 4
# A tensor takes 15 us at each start, an element of an array 0.3 us. Files have some 2,000 tensors,
# 60 values, and 600,000 merges.
MAX_TENSORS = 1 << 17
MAX_VALUES = 1 << 14
MAX_COUNT = 1 << 22  # of the elements of an array
MAX_ELEMENTS = 2**63 - 1

# For each ggml_type: its name, elements per block, and bytes per block. The table includes types
# that cpuserve does not support, so that an error message can show the name of the type.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
    42: ("Q2_0", 64, 18),
    142: ("PQ2_0", 128, 34),
    143: ("PTQ1_0", 128, 28),
}

_STRING, _ARRAY, _BOOL = 8, 9, 7
# The struct format character for each type of metadata value.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the tensor table of a GGUF file.

    shape: the outermost dimension comes first.
    offset: bytes from the beginning of the file to the data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int
    file: AnyFile = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Value:
    """The position and type of a metadata value; of an array, its element type and count."""

    type: int
    offset: int
    element: int = -1
    count: int = 1


class _Cursor:
    """Reads the header from start to end; an error message has the field that was being read."""

    def __init__(self, file: AnyFile) -> None:
        self.file = file
        self.at = 0

    def fail(self, field: str, why: str) -> NoReturn:
        msg = f"broken GGUF {self.file.path}: {field}: {why}"
        raise ModelError(msg)

    def take(self, size: int, field: str) -> int:
        """Advance by `size` bytes and return their offset; ModelError if the file is too short."""
        start = self.at
        if size > self.file.size - start:
            why = (
                f"the file ends at byte {self.file.size}, but needs {size} bytes from byte {start}"
            )
            self.fail(field, why)
        self.at = start + size
        return start

    def number(self, code: str, field: str) -> Any:
        at = self.take(struct.calcsize(code), field)
        return struct.unpack_from(code, self.file.map, at)[0]

    def text(self, max_bytes: int, field: str) -> str:
        size = self.number("<Q", f"{field} size")
        if not 0 < size <= max_bytes:
            self.fail(f"{field} size", f"{size} is not between 1 and {max_bytes}")
        at = self.take(size, field)
        data = bytes(self.file.map[at : at + size])
        try:
            name = data.decode()
        except UnicodeDecodeError:
            self.fail(field, "it is not UTF-8")
        # Error messages show the names of keys and tensors,
        # so the names must not contain line breaks or terminal commands.
        if not name.isprintable():
            self.fail(field, f"{data[:40]!r} is not printable")
        return name

    def skip_strings(self, count: int, field: str) -> None:
        """Skip `count` length-prefixed strings: most of the time to open a file is spent here."""
        at, unpack, data, size = self.at, _U64.unpack_from, self.file.map, self.file.size
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError, IndexError, ValueError):
            at = size + 1
        if at > size:
            self.fail(field, f"its strings run beyond the end of the file (byte {size})")
        self.at = at


class GgufFile:
    """An open GGUF file with a completely checked header; its data is mapped, but not read."""

    def __init__(self, path: Path, copy: AnyFile | None = None) -> None:
        """Open and check `path`, or `copy` if passed; ModelError reports the invalid field."""
        self.path = path
        self.file = copy or MappedFile(path, "GGUF file")
        cursor: _Cursor = _Cursor(self.file)
        num_tensors, num_values = _read_counts(cursor)
        self._values = dict(_read_values(cursor, num_values))
        self.alignment = self._read_alignment(cursor)
        self.tensors = _read_tensors(cursor, num_tensors, self.alignment)
        # Release the pages of the vocabulary (megabytes); a later access reads them again.
        self.file.release(0, cursor.at)

    def keys(self) -> list[str]:
        """The metadata keys in the order of the file."""
        return list(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def count(self, key: str) -> int:
        """The length of an array (1 for another value, 0 without the key), without decoding it."""
        return self._values[key].count if key in self._values else 0

    def value(self, key: str) -> Any:
        """The decoded value (int, float, bool, str or a list of these); None without the key."""
        found = self._values.get(key)
        if found is None:
            return None
        if found.type == _ARRAY:
            return self._array(key, found)
        if found.type == _STRING:
            return self._strings(key, found.offset, 1)[0]
        value = struct.unpack_from(_SCALARS[found.type], self.file.map, found.offset)[0]
        return bool(value) if found.type == _BOOL else value

    def positions(self, key: str, texts: Collection[str]) -> dict[str, int]:
        """The positions of `texts` in an array of strings; other strings are not decoded."""
        found = self._values.get(key)
        if found is None or found.element != _STRING:
            return {}
        wanted = {text.encode(): text for text in texts}
        sizes = {len(encoded) for encoded in wanted}
        data, unpack, at = self.file.map, _U64.unpack_from, found.offset
        positions = {}
        for position in range(found.count):
            (size,) = unpack(data, at)
            at += 8 + size
            if size in sizes and (encoded := bytes(data[at - size : at])) in wanted:
                positions[wanted[encoded]] = position
        self.file.release(found.offset, at - found.offset)
        return positions

    def data(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes as a mapped view; ModelError if the file has changed."""
        tensor.file.check_unchanged()
        return tensor.file.view(tensor.offset, tensor.size)

    def numbers(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        """Return the values of a tensor as a mapped view; ModelError if its type is not F32."""
        if tensor.dtype != "F32":
            msg = f"GGUF {self.path}: {tensor.name} has type {tensor.dtype}, but must be F32"
            raise ModelError(msg)
        return self.data(tensor).view("<f4")

    def add_tensors(self, part: GgufFile) -> None:
        """Add the tensors of another file of this model; ModelError if a tensor exists already."""
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                msg = (
                    f"GGUF {part.path}: tensor {name} is also in {self.tensors[name].file.path}, "
                    "another part of this model"
                )
                raise ModelError(msg)
            self.tensors[name] = tensor

    def _array(self, key: str, found: _Value) -> list[Any]:
        if found.element == _STRING:
            return self._strings(key, found.offset, found.count)
        code = f"<{found.count}{_SCALARS[found.element][1]}"
        listed = list(struct.unpack_from(code, self.file.map, found.offset))
        return [bool(v) for v in listed] if found.element == _BOOL else listed

    def _strings(self, key: str, at: int, count: int) -> list[str]:
        data, unpack = self.file.map, _U64.unpack_from
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(data, at)[0]
                found.append(data[start:at].decode())
        except UnicodeDecodeError as error:
            msg = f"broken GGUF {self.path}: {key}: entry {len(found)} is not UTF-8"
            raise ModelError(msg) from error
        return found

    def _read_alignment(self, cursor: _Cursor) -> int:
        key = "general.alignment"
        found = self._values.get(key)
        if found is None:
            return DEFAULT_ALIGNMENT
        if found.type != 4:
            cursor.fail(key, "it must be a uint32")
        value = self.value(key)
        if value <= 0 or value & (value - 1):
            cursor.fail(key, f"{value} is not a power of two")
        return int(value)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the number of tensors and the number of key-value pairs, from the fixed header."""
    at = cursor.take(4, "magic")
    magic = bytes(cursor.file.map[at : at + 4])
    if magic != MAGIC:
        cursor.fail("magic", f"it starts with {magic!r}, not {MAGIC!r}, so it is not a GGUF file")
    version = cursor.number("<I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = f"{version} is not supported, only 2 and 3"
        if swapped in VERSIONS:
            why = "the file is big-endian; convert it to little-endian"
        cursor.fail("version", why)
    num_tensors = cursor.number("<Q", "tensor count")
    num_values = cursor.number("<Q", "metadata count")
    # The minimum sizes: a key-value pair has 8 + 1 + 4 + 1 bytes, a tensor 8 + 1 + 4 + 8 + 4 + 8.
    for count, most, what in (
        (num_values, MAX_VALUES, "metadata count"),
        (num_tensors, MAX_TENSORS, "tensor count"),
    ):
        if count > most:
            cursor.fail(what, f"{count} are more than {most}, the most that are accepted")
    _check_count(cursor, num_values, 14, "metadata count")
    _check_count(cursor, num_tensors, 33, "tensor count")
    return num_tensors, num_values


def _check_count(cursor: _Cursor, count: int, entry_bytes: int, field: str) -> None:
    left = cursor.file.size - cursor.at
    if count > left // entry_bytes:
        cursor.fail(field, f"{count} entries do not fit in the remaining {left} bytes of the file")


def _read_values(cursor: _Cursor, count: int) -> Iterator[tuple[str, _Value]]:
    seen: set[str] = set()
    for index in range(count):
        key = cursor.text(MAX_KEY_BYTES, f"metadata key {index}")
        if key in seen:
            cursor.fail(key, "the key occurs twice")
        seen.add(key)
        yield key, _read_value(cursor, key)


def _read_value(cursor: _Cursor, key: str) -> _Value:
    kind = cursor.number("<I", f"{key} type")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    at = cursor.at
    if kind == _STRING:
        cursor.skip_strings(1, key)
    elif kind in _SCALARS:
        cursor.take(struct.calcsize(_SCALARS[kind]), key)
        if kind == _BOOL and cursor.file.map[at] > 1:
            cursor.fail(key, f"{cursor.file.map[at]} is not a boolean")
    else:
        cursor.fail(f"{key} type", f"{kind} is not a metadata type")
    return _Value(kind, at)


def _read_array(cursor: _Cursor, key: str) -> _Value:
    element = cursor.number("<I", f"{key} element type")
    count = cursor.number("<Q", f"{key} length")
    if count > MAX_COUNT:
        cursor.fail(f"{key} length", f"{count} elements are more than {MAX_COUNT}")
    if element == _STRING:
        _check_count(cursor, count, 8, f"{key} length")
        at = cursor.at
        cursor.skip_strings(count, key)
    elif element in _SCALARS:
        item = struct.calcsize(_SCALARS[element])
        _check_count(cursor, count, item, f"{key} length")
        at = cursor.take(count * item, key)
    else:
        cursor.fail(f"{key} element type", f"{element} is not an array element type")
    return _Value(_ARRAY, at, element, count)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors with absolute offsets, after checks for the file size and overlaps."""
    table = [_read_tensor(cursor, index) for index in range(count)]
    start = -(-cursor.at // alignment) * alignment
    found: dict[str, GgufTensor] = {}
    for row in table:
        if row.name in found:
            cursor.fail(f"tensor {row.name}", "the name occurs twice")
        if row.offset % alignment:
            why = f"{row.offset} is not a multiple of the alignment {alignment}"
            cursor.fail(f"tensor {row.name} offset", why)
        end = start + row.offset + row.size
        if end > cursor.file.size:
            why = (
                f"its data ends at byte {end}, but the file at byte {cursor.file.size}; the file "
                "may be truncated: download it again"
            )
            cursor.fail(f"tensor {row.name} offset", why)
        found[row.name] = replace(row, offset=start + row.offset)
    _check_overlap(cursor, found)
    return found


def _read_tensor(cursor: _Cursor, index: int) -> GgufTensor:
    name = cursor.text(MAX_NAME_BYTES, f"tensor {index} name")
    num_dims = cursor.number("<I", f"tensor {name} dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"tensor {name} dimensions", f"{num_dims} is not between 1 and 4")
    dims = [cursor.number("<Q", f"tensor {name} size {i}") for i in range(num_dims)]
    type_id = cursor.number("<I", f"tensor {name} type")
    offset = cursor.number("<Q", f"tensor {name} offset")
    if type_id not in TENSOR_TYPES:
        _refuse_type(cursor, name, type_id)
    dtype, block, block_bytes = TENSOR_TYPES[type_id]
    elements = 1
    for i, dim in enumerate(dims):
        elements *= dim
        if dim == 0 or elements > MAX_ELEMENTS:
            cursor.fail(f"tensor {name} size {i}", f"{dim} is zero or too big")
    if dims[0] % block:
        why = f"{dims[0]} is not a multiple of {dtype}'s block of {block}"
        cursor.fail(f"tensor {name} size 0", why)
    size = elements // block * block_bytes
    return GgufTensor(name, tuple(reversed(dims)), dtype, offset, size, cursor.file)


def _refuse_type(cursor: _Cursor, name: str, type_id: int) -> NoReturn:
    """Raise the ModelError for a type number that is not in TENSOR_TYPES."""
    what = foreign_type(type_id)
    if not what:
        cursor.fail(f"tensor {name} type", f"{type_id} is not a known tensor type")
    from cpuserve.quant.gguf.blocks import SOURCES

    msg = (
        f"GGUF {cursor.file.path}: tensor {name} has type {type_id}, {what}, which is not "
        f"supported; supported: {', '.join(SOURCES)}; download the model as Q4_K_M or IQ4_XS, or "
        "make such a file from the original"
    )
    raise ModelError(msg)


def _check_overlap(cursor: _Cursor, tensors: dict[str, GgufTensor]) -> None:
    end, owner = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            why = f"its data overlaps that of {owner}"
            cursor.fail(f"tensor {tensor.name} offset", why)
        end, owner = tensor.offset + tensor.size, tensor.name
