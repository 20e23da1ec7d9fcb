"""Output heads under tie_word_embeddings: what is in the file is what transformers uses."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve import LLM, SamplingParams
from cpuserve.cli import banner
from cpuserve.cli.main import main
from cpuserve.config.load import from_arguments
from cpuserve.loader.heads import with_own_head
from cpuserve.loader.load import check_weights, open_checkpoint, read_config
from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.models import build_program, spec_from_config
from cpuserve.prepare import prepare
from cpuserve.quant import dequantize
from tests.helpers import gguf_archs, gguf_convert
from tests.helpers.depth import deep_but
from tests.helpers.oracle import transformers_logits
from tests.helpers.tiny import FAMILIES, SAMPLE, tiny_model

SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(30)]
# All families but two, which refuse it: each can be tied. In some, a config without the key is.
UNTIED = ("deepseek-v4", "dbrx")
TIED = {family: {"tie_word_embeddings": True} for family in FAMILIES if family not in UNTIED}
# GGUF files have no word for it: a file without an output matrix is tied.
GGUF = {
    arch: family
    for arch, (family, _, _) in gguf_archs.ARCHS.items()
    if family in TIED and arch not in gguf_archs.ENCODERS
}


def names(spec_config):
    """(the head of its own, the table it is tied to): names of tensors."""
    tied = build_program(spec_from_config({**spec_config, "tie_word_embeddings": True}))
    other = {"tie_word_embeddings": False}
    if "tie_embedding" in spec_config:
        other["tie_embedding"] = False
    return build_program(spec_from_config({**spec_config, **other})).ops[-1].weight, tied.ops[
        -1
    ].weight


def with_head(family, folder, change, *, dtype="float32", **changes):
    """A tied tiny model with a head in its file: the table, changed by `change`."""
    source = tiny_model(family, dtype=dtype, **{**changes, **TIED[family]})
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    head, table = names(json.loads((folder / "config.json").read_text()))
    table = next(name for name in tensors if checkpoint_to_hf(name) == table)
    tensors[head] = change(tensors[table].clone())
    save_file(tensors, folder / "model.safetensors")
    return folder


def last_row(table):
    """The smallest change: one weight of the last token."""
    table[-1, -1] += 4
    return table


def every_row(table):
    return table.flip(0).contiguous()


def prompt_logprobs(path, **options):
    types = {"dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 64}
    with LLM(str(path), **{**types, **options}) as llm:
        (output,) = llm.generate([TOKENS], SCORED)
    found = output.prompt_logprobs
    return torch.tensor([found[i][t].logprob for i, t in enumerate(TOKENS) if i])


def logprobs_of(logits):
    """The logprob of each token after the first."""
    rows = logits.log_softmax(dim=1)
    return rows[torch.arange(len(TOKENS) - 1), torch.tensor(TOKENS[1:])]


@pytest.mark.parametrize("family", deep_but(SAMPLE[:3], TIED))
def test_a_head_of_its_own_is_used_as_in_transformers(tmp_path, family):
    path = with_head(family, tmp_path / "m", every_row)
    logits = transformers_logits(path, TOKENS)
    want = logprobs_of(logits)
    assert (prompt_logprobs(path) - want).abs().max() < 5e-3
    of_table = logprobs_of(logits.flip(1))  # the head has the rows of the table in reverse
    assert (of_table - want).abs().max() > 0.1


# Types differ in the bytes that are compared, families in the names of the two matrices.
OF_TYPES = [*((family, "float32") for family in TIED), *((family, "bfloat16") for family in SAMPLE)]
FEW_OF_TYPES = [*((family, "float32") for family in SAMPLE[:3]), (SAMPLE[0], "bfloat16")]


@pytest.mark.parametrize("case", deep_but(FEW_OF_TYPES, OF_TYPES), ids="-".join)
def test_the_smallest_difference_counts_and_a_copy_does_not(tmp_path, case):
    family, dtype = case
    other = open_checkpoint(with_head(family, tmp_path / "other", last_row, dtype=dtype))
    spec = spec_from_config(other.config)
    assert not spec.tied
    check_weights(build_program(spec), other.weights)
    copy = open_checkpoint(with_head(family, tmp_path / "copy", lambda table: table, dtype=dtype))
    spec = spec_from_config(copy.config)
    assert spec.tied
    check_weights(build_program(spec), copy.weights)
    assert copy.config == read_config(copy.path)


def test_a_model_without_such_a_head_keeps_its_config():
    checkpoint = open_checkpoint(tiny_model("qwen2", tie_word_embeddings=True))
    assert with_own_head(checkpoint.config, checkpoint.weights) is checkpoint.config


def test_the_banner_and_the_decisions_say_so(tmp_path):
    def prepared(path):
        return prepare(from_arguments({"model": str(path)}, environ={}))

    own = prepared(with_head("llama", tmp_path / "own", every_row))
    assert "head      the file's own (it differs from the embeddings" in banner.render(own)
    assert "output_head" in {d.field for d in own.resolved.decisions}
    assert not own.spec.tied
    tied = prepared(with_head("llama", tmp_path / "copy", lambda table: table))
    assert "output_head" not in {d.field for d in tied.resolved.decisions}
    assert own.facts.matrix_weights - tied.facts.matrix_weights == 512 * 64


@pytest.mark.parametrize("arch", deep_but([*GGUF][::6], GGUF))
def test_gguf_files_have_the_head_that_is_in_them(tmp_path, arch):
    changes = gguf_archs.ARCHS[arch][1]
    source = with_head(GGUF[arch], tmp_path / "m", every_row, **changes)
    gguf_convert.convert(arch, tmp_path / "m.gguf", source=source)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    spec = spec_from_config(checkpoint.config)
    assert not spec.tied
    program = build_program(spec)
    check_weights(program, checkpoint.weights)
    config = json.loads((source / "config.json").read_text())
    head, _ = names(config)
    # Files of Falcon-H1 have a head that is already multiplied.
    factor = config.get("lm_head_multiplier", 1.0)
    want = (load_file(source / "model.safetensors")[head] * factor).numpy()
    assert np.array_equal(dequantize(checkpoint.weights.get(program.ops[-1].weight)), want)


def test_a_quantized_copy_keeps_the_head(tmp_path):
    source = with_head("llama", tmp_path / "m", every_row)
    assert main(["quantize", str(source), str(tmp_path / "q"), "--scheme", "int8"]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "own_head" not in config
    want = logprobs_of(transformers_logits(source, TOKENS))
    assert (prompt_logprobs(tmp_path / "q") - want).abs().max() < 0.5
