"""The rotation of a GGUF file's matrices, as files of Prism's Bonsai 2 describe it.

The keys "prism.hadamard.*" say which matrices are rotated and how (program/rotation.py). A file
that is read without its rotation gives senseless text, so every value that is not known here is
refused. Source: the loader of llama.cpp in the fork of PrismML-Eng, and llama.cpp issue 29058.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile

_PREFIX = "prism.hadamard."
_BLOCK = 1024
# The only value of each of these keys.
_ONLY = {
    "version": 1,
    "block_size": _BLOCK,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
}
_SIGNS = ("sign_widths", "sign_values")
_NAMES = ("weight_names", "inverse_weight_names")
_KEYS = (*_ONLY, "sign_mode", *_SIGNS, *_NAMES, "gdn_v_grouped")
# The matrices that may be rotated.
_MATRIX = re.compile(
    r"blk\.\d+\.(?:attn_(?:q|k|v|qkv|gate|output)|ffn_(?:gate|up|down)|ssm_out)\.weight"
    r"|output\.weight"
)
_TABLE = "token_embd.weight"
_GROUPED = ".ssm_out.weight"
_MOST_COLUMNS = 1 << 22  # of all vectors of signs


def rotation_of(file: GgufFile, name_of: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the rotation for the config (models/rotations.py); None if no matrix is rotated.

    name_of: returns the Hugging Face name of a tensor.
    Raises ModelError for a key or value that is not known, and for names and signs that do not fit.
    """
    keys = [key for key in file.keys() if key.startswith(_PREFIX)]  # noqa: SIM118 not a dict
    if not keys:
        return None
    for key in keys:
        if key.removeprefix(_PREFIX) not in _KEYS:
            _fail(file, key.removeprefix(_PREFIX), f"absent; known: {', '.join(_KEYS)}")
    for key, value in _ONLY.items():
        found = file.value(_PREFIX + key) if file.count(_PREFIX + key) <= 1 else "a list"
        if type(found) is not type(value) or found != value:
            _fail(file, key, repr(value))
    signs = _signs(file)
    matrices, tables = (_names(file, key) for key in _NAMES)
    if not matrices:
        _fail(file, "weight_names", "a list of matrices")
    for key, names in zip(_NAMES, (matrices, tables), strict=True):
        for name in names:
            _check(file, key, name, signs)
    grouped = file.value(_PREFIX + "gdn_v_grouped")
    if grouped is not None and not isinstance(grouped, bool):
        _fail(file, "gdn_v_grouped", "true or false")
    return {
        "block": _BLOCK,
        "matrices": [name_of(name) for name in matrices],
        "tables": [name_of(name) for name in tables],
        "signs": {} if signs is None else {str(width): bits for width, bits in signs.items()},
        "grouped": [name_of(n) for n in matrices if grouped and n.endswith(_GROUPED)],
    }


def _signs(file: GgufFile) -> dict[int, str] | None:
    """Return for each width the bits of its signs in hexadecimal digits; None: all signs are 1."""
    import numpy as np

    mode = _text(file, "sign_mode")
    if mode == "identity":
        for key in _SIGNS:
            if file.count(_PREFIX + key):
                _fail(file, key, "absent, because sign_mode is identity")
        return None
    if mode != "explicit":
        _fail(file, "sign_mode", "'explicit' or 'identity'")
    widths = _list(file, "sign_widths", int, _MOST_COLUMNS // _BLOCK)
    if len(set(widths)) < len(widths) or not all(w > 0 and w % _BLOCK == 0 for w in widths):
        _fail(file, "sign_widths", f"different multiples of {_BLOCK}")
    values = _list(file, "sign_values", int, _MOST_COLUMNS)
    if len(values) != sum(widths) or not set(values) <= {1, -1}:
        _fail(file, "sign_values", f"{sum(widths)} numbers 1 and -1, as sign_widths says")
    negative, found, first = np.array(values) < 0, {}, 0
    for width in widths:
        bits = np.packbits(negative[first : first + width], bitorder="little")
        found[width] = bits.tobytes().hex()
        first += width
    return found


def _names(file: GgufFile, key: str) -> list[str]:
    if key == "inverse_weight_names" and not file.count(_PREFIX + key):
        return []
    names = _list(file, key, str, len(file.tensors))
    if len(set(names)) < len(names):
        _fail(file, key, "names that differ")
    return names


def _check(file: GgufFile, key: str, name: str, signs: dict[int, str] | None) -> None:
    """Raise ModelError unless tensor `name` is a matrix that may be rotated, and has its signs."""
    known = name == _TABLE if key == "inverse_weight_names" else _MATRIX.fullmatch(name)
    if not known:
        wanted = _TABLE if key == "inverse_weight_names" else "matrices of attention and dense MLPs"
        _fail(file, key, f"the names of {wanted}, not {name!r:.80}")
    tensor = file.tensors.get(name)
    if tensor is None:
        _fail(file, key, f"the names of tensors of the file, which has no {name}")
    columns = tensor.shape[-1]
    if len(tensor.shape) != 2 or columns % _BLOCK:
        _fail(file, key, f"matrices with a multiple of {_BLOCK} columns; {name} has {columns}")
    if signs is not None and columns not in signs:
        _fail(file, "sign_widths", f"a list with {columns}, the columns of {name}")


def _text(file: GgufFile, key: str) -> str:
    value = file.value(_PREFIX + key) if file.count(_PREFIX + key) == 1 else None
    return value if isinstance(value, str) else ""


def _list(file: GgufFile, key: str, kind: type, most: int) -> list[Any]:
    """Return a list with 1 to `most` values of type `kind`."""
    if not 1 <= file.count(_PREFIX + key) <= most:
        _fail(file, key, f"a list of 1 to {most} values")
    values = file.value(_PREFIX + key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        _fail(file, key, f"a list of {'names' if kind is str else 'integers'}")
    return values


def _fail(file: GgufFile, key: str, wanted: str) -> NoReturn:
    count = file.count(_PREFIX + key)
    shown = "is missing" if not count else f"has {count} values"
    if count == 1:
        shown = f"is {file.value(_PREFIX + key)!r:.60}"
    msg = f"GGUF {file.path}: {_PREFIX}{key} {shown}; it must be {wanted}"
    raise ModelError(msg)
