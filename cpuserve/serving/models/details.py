"""ModelDetails: facts about the files of a model, for clients that list models."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2))


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """Facts about the files of a model; 0 and "" mean unknown.

    source: the model as it was given, without the folders of a path.
    family: the `model_type` in the model's config.
    format: "gguf" or "safetensors".
    quantization: the type of most weights, such as "Q4_K" or "BF16".
    parameters: the number of weights in all tensors.
    size_bytes: the bytes of all tensors.
    trained_len: the longest sequence in tokens that the model was trained for.
    vocab: the number of token ids.
    width: the hidden size.
    layers: the number of layers.
    path: where the files are.
    mmproj: the GGUF file with the tower of a model in a GGUF file; "" = none.
    """

    source: str = ""
    family: str = ""
    format: str = ""
    quantization: str = ""
    parameters: int = 0
    size_bytes: int = 0
    trained_len: int = 0
    vocab: int = 0
    width: int = 0
    layers: int = 0
    path: str = ""
    mmproj: str = ""

    @property
    def parameter_size(self) -> str:
        """The number of weights as a text such as "134.52M" or "7.6B"; "" if it is unknown."""
        for unit, letter, digits in _UNITS:
            if self.parameters >= unit:
                return f"{self.parameters / unit:.{digits}f}{letter}"
        return str(self.parameters or "")
