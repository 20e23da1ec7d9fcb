"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile


class Keys:
    """Typed access to the metadata of one architecture; errors show the key and its value."""

    def __init__(
        self, file: GgufFile, arch: str, *, mixed: bool = False, guesses: bool = False
    ) -> None:
        """mixed: a value may be a list with a number per layer; `count` then returns the first.

        guesses: whether all blocks are for multi-token prediction.
        """
        self.file = file
        self.guesses = guesses
        self.arch = arch
        self.mixed = mixed

    def raw(self, key: str) -> Any:
        """Return the value of "<arch>.<key>"; None if the key is absent."""
        return self.file.value(f"{self.arch}.{key}")

    def count(self, key: str, default: int | None = None, *, some: bool = False) -> int:
        """Return a positive integer; without a default the key is required.

        some: whether the value may be a list with a number for each layer.
        A 0 then means that the layer has no such part; all other numbers must be equal.
        """
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if self.mixed and isinstance(value, list):
            return self.of_layer(key, 0)
        if isinstance(value, list) and len(kinds := set(value) - ({0} if some else set())) == 1:
            value = kinds.pop()
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fail(key, value, "a positive integer (the same for all layers)")
        return value

    def of_layer(self, key: str, layer: int) -> int:
        """Return the positive integer for a layer, from a list or from a number for all layers."""
        value = self.raw(key)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fail(key, self.raw(key), "a positive integer for each layer")
        return value

    def whole(self, key: str) -> int:
        """Return an integer that is not negative; 0 if the key is absent."""
        value = self.raw(key)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(key, value, "an integer that is not negative")
        return value

    def layers(self) -> int:
        """Return the number of blocks, without the last ones of a model that guess tokens."""
        blocks, guessers = self.count("block_count"), self.whole("nextn_predict_layers")
        if self.guesses:
            return blocks
        if guessers >= blocks:
            self.fail("nextn_predict_layers", guessers, f"less than block_count, {blocks}")
        if guessers and not any(name.startswith("blk.0.") for name in self.file.tensors):
            wanted = (
                "absent: the file has only the head that guesses tokens. Give the file of the "
                "model; a head is read from the same file, or from safetensors"
            )
            self.fail("nextn_predict_layers", guessers, wanted)
        return blocks - guessers

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite positive number; without a default the key is required."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < float("inf"):
            self.fail(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; `default` if the key is absent."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def layer_types(self, recurrent: str, attention: str) -> list[str]:
        """Return for each layer `attention` if it has KV heads, else `recurrent`."""
        heads = self.raw("attention.head_count_kv")
        if not isinstance(heads, list):
            return [attention] * self.layers()
        return [attention if count else recurrent for count in heads[: self.layers()]]

    def windows(self) -> list[str]:
        """Return the kind of each layer: "sliding_attention" or "full_attention"."""
        windows = self.raw("attention.sliding_window_pattern")
        if not isinstance(windows, list) or not all(w in (0, 1) for w in windows):
            self.fail("attention.sliding_window_pattern", windows, "a list of booleans")
        return [("full_attention", "sliding_attention")[w] for w in windows[: self.layers()]]

    def numbers(self, tensor: str) -> list[float] | None:
        """Return the numbers in a small F32 tensor; None if the file has no such tensor."""
        found = self.file.tensors.get(tensor)
        return None if found is None else [float(v) for v in self.file.numbers(found)]

    def has(self, tensor: str) -> bool:
        """Whether the file has this tensor."""
        return tensor in self.file.tensors

    def fail(self, key: str, value: Any, wanted: str) -> NoReturn:
        """Raise a ModelError that says how "<arch>.<key>" is wrong."""
        is_what = "is missing" if value is None else f"is {value!r:.60}"
        msg = f"GGUF {self.file.path}: {self.arch}.{key} {is_what}; it must be {wanted}"
        raise ModelError(msg)
