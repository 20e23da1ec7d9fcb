"""benchmarks/make_model.py: a seed gives checkpoints that other programs can load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cpuserve.models import build_program, spec_from_config
from tests.helpers.oracle import program_of, tensors_of, transformers_logits
from tests.helpers.tiny import make_model_module, tiny_config, tiny_model

make = make_model_module()

PARAMETERS = {  # of the published models, embedding counted once where tied
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "deepseek-v2-lite": 15_706_484_224,
    "opt-125m": 125_239_296,
}


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_the_parameters_of_the_published_models(shape):
    program = build_program(spec_from_config(make.SHAPES[shape]))
    assert sum(int(np.prod(need.shape)) for need in program.weights) == PARAMETERS[shape]


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = make.make_model(tiny_config("qwen3"), tmp_path / name, seed)
        files.append((path / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]


def test_shards_hold_what_one_file_holds(tmp_path, monkeypatch):
    whole = tensors_of(tiny_model("llama"))
    monkeypatch.setattr(make, "SHARD_BYTES", 200_000)
    monkeypatch.setattr(make, "CHUNK", 1000)  # the chunk size must not change the random values
    path = make.make_model(tiny_config("llama"), tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert set(index["weight_map"]) == set(whole)
    assert {f.name for f in shards} == set(index["weight_map"].values())
    for file in shards:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 200_000
        for name, tensor in tensors.items():
            assert index["weight_map"][name] == file.name
            assert torch.equal(tensor, whole[name])
    assert torch.isfinite(transformers_logits(path, [1, 2, 3])).all()


def test_bfloat16_is_the_rounding_torch_does():
    values = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    values[:4] = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0])  # ties
    got = make._as_bytes(values.numpy(), "bfloat16")
    assert got == values.bfloat16().view(torch.int16).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_stay_finite_in_sixteen_bits(dtype):
    logits = transformers_logits(tiny_model("opt", dtype=dtype), list(range(200)))
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_the_tokenizer_knows_any_text_and_has_its_ends():
    path = tiny_model("llama")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "The capital of France, naïve 日本語 🙂\n\t0123"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("The capital of France").ids) < 8
    assert tokenizer.get_vocab_size() < program_of(path).vocab
    config = json.loads((path / "config.json").read_text())
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|im_end|>"


def test_the_command_line_writes_into_new_directories_only(tmp_path, capsys):
    assert make.main(["tiny-opt", str(tmp_path / "m")]) == 0
    assert "tiny-opt" in capsys.readouterr().out
    assert make.main(["tiny-opt", str(tmp_path / "m")]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        make.main(["no-such-shape", str(tmp_path / "n")])
