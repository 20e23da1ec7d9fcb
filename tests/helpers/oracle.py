"""Interpreter and transformers models of a checkpoint directory, for comparisons."""

from __future__ import annotations

import functools
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.models import build_program, spec_from_config, stored_names
from cpuserve.program.interpret import Interpreter
from cpuserve.program.program import Program
from tests.helpers import zamba
from tests.helpers.dbrx import flat
from tests.helpers.gemma4 import stacked
from tests.helpers.glm5_next import text_model
from tests.helpers.gpt_oss import published
from tests.helpers.hy_v4 import with_halves
from tests.helpers.minimax_m3 import renamed as with_names_of_m3
from tests.helpers.molmo2 import renamed as with_names_of_molmo2
from tests.helpers.molmo2 import text_model as molmo2_model
from tests.helpers.muse_glimmer import text_model as muse_glimmer_model
from tests.helpers.rounding import doubles
from tests.helpers.rwkv import PlainRwkv7, config_of
from tests.helpers.rwkv6 import PlainRwkv6
from tests.helpers.step3 import renamed
from tests.helpers.step3 import text_model as step3_model

# Families whose published files have one tensor for all experts of a layer.
_STACKED = (
    *("Mistral4ForCausalLM", "GraniteMoeSWAForCausalLM", "HYV4ForCausalLM"),
    "LaraMiniForCausalLM",
)


def program_of(path: Path) -> Program:
    """The Program of a checkpoint directory."""
    return build_program(spec_from_config(json.loads((path / "config.json").read_text())))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint directory, under the names that Programs use."""
    read = (load_file(file).items() for file in sorted(path.glob("*.safetensors")))
    names = stored_names(json.loads((path / "config.json").read_text()))
    return {
        checkpoint_to_hf(names.normalize(name)): tensor for items in read for name, tensor in items
    }


class PreciseInterpreter(Interpreter):
    """An Interpreter that computes in fp64, so that orders of summation hardly matter."""

    def __init__(self, program, tensors, **options):
        with doubles():
            wide = {name: _double(tensor) for name, tensor in tensors.items()}
            super().__init__(program, wide, **options)

    def set_weight(self, name, tensor):
        super().set_weight(name, _double(tensor))

    def run_op(self, index, inputs):
        with doubles():
            return super().run_op(index, inputs)

    def logits(self, hidden):
        with doubles():
            return super().logits(hidden)


def _double(tensor):
    return tensor.double() if isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def precise_torch():
    """Let torch executors that are made meanwhile, in this process, compute in fp64.

    In torch, the order of a sum depends on the number of rows in a step. In fp32 this may change
    the result if two tokens have nearly equal logits: about once in ten thousand tokens, and at
    another token on another CPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cpuserve.program.interpret.Interpreter", PreciseInterpreter)
        yield


def interpreter_of(path: Path, made=Interpreter, **options) -> Interpreter:
    """An Interpreter of a checkpoint directory; recurrent layers get a state slot by block."""
    program = program_of(path)
    states = {"num_states": 64} if program.states else {}
    return made(program, tensors_of(path), **states, **options)


def first_state(interpreter: Interpreter) -> int:
    """`Sequence.first_state` for an Interpreter."""
    return interpreter.num_blocks if interpreter.program.states else 0


# transformers has none of them.
PLAIN = {
    **dict.fromkeys(("RWKV6ForCausalLM", "RWKV6Qwen2ForCausalLM"), PlainRwkv6),
    **dict.fromkeys(("RWKV7ForCausalLM", "RwkvHybridForCausalLM"), PlainRwkv7),
}


@functools.cache
def transformers_of(path: Path):
    """The transformers model of a checkpoint directory, fp32, eager attention."""
    return _transformers_of(path)


def _transformers_of(path: Path):
    if (plain := PLAIN.get(config_of(path)["architectures"][0])) is not None:
        return plain(config_of(path), tensors_of(path)).eval()
    import transformers

    if any("experts.0.gate_proj.bias" in name for name in tensors_of(path)):
        path = published(path)  # gpt-oss; transformers reads no other layout
    elif any("router.per_expert_scale" in name for name in tensors_of(path)):
        path = stacked(path)  # Gemma 4
    config = json.loads((path / "config.json").read_text())
    if config["architectures"][0] in _STACKED:
        path = stacked(path)
    if config["architectures"] == ["HYV4ForCausalLM"]:
        path = with_halves(path)
    if config["architectures"] == ["MiniMaxM3VLForCausalLM"]:
        path = with_names_of_m3(path)
    if config["architectures"] == ["ZambaForCausalLM"]:
        path = zamba.published(path)
    if config["architectures"] == ["DbrxForCausalLM"]:
        path = flat(path)
    if config["architectures"] in (["Llama4ForCausalLM"], ["AriaTextForCausalLM"]):
        path = stacked(path, by_inputs=True)
    if config["architectures"] == ["LongcatFlashForCausalLM"]:
        path = stacked(path, unused=config["zero_expert_num"])
    more = {}
    if config.get("quantization_config", {}).get("quant_method") == "mxfp4":
        more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    if config["architectures"] == ["YoutuForCausalLM"]:
        more["pad_token_id"] = None  # or transformers overwrites its loaded embedding with zeros
    transformers.utils.logging.disable_progress_bar()
    # The automatic class does not know Mistral Small 4.
    made = getattr(transformers, config["architectures"][0], transformers.AutoModelForCausalLM)
    if config["architectures"] == ["Glm5NextForCausalLM"]:
        made = text_model()
    if config["architectures"] == ["Step3p5ForCausalLM"]:
        path, made = renamed(path), step3_model()
    if config["architectures"] == ["Molmo2ForCausalLM"]:
        path, made = with_names_of_molmo2(path), molmo2_model()
    if config["architectures"] == ["MuseGlimmerForCausalLM"]:
        made = muse_glimmer_model()
    model, info = made.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, **more
    )
    # The comparison is meaningless if transformers misses weights or ignores some. Indexers change
    # nothing as long as they keep all keys.
    left = (
        ".slope_rate",
        "_decay",
        ".indexer.",
        ".ple_embedding.layer_",
        ".ple_embedding.ngram_heads_",
    )  # or constants
    assert not [name for name in info["missing_keys"] if not any(part in name for part in left)]
    assert not info["unexpected_keys"]
    return model.eval()


def transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """fp32 logits [len(tokens), vocab] of transformers."""
    with torch.inference_mode():
        return transformers_of(path)(torch.tensor([tokens])).logits[0]


@functools.cache
def _precise_transformers_of(path: Path):
    """Return transformers_of(path) in fp64; constants that it computes in fp32 stay rounded.

    It is read again: a copy of a model has copies of its config, one for each module.
    """
    return _transformers_of(path).double()


def precise_transformers_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """fp64 logits [len(tokens), vocab] of transformers."""
    model = _precise_transformers_of(path)
    with doubles(), torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]
