"""Models without a Program: the Executor protocol on a transformers model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from cpuserve.base.errors import ModelError
from cpuserve.engine.build import build_engine
from cpuserve.models import find_model
from cpuserve.models.generic import generic_spec, read_spec
from cpuserve.runtime.transformers_fallback import TransformersExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.oracle import transformers_logits
from tests.helpers.rounding import assert_likeliest, largest, sum_bound
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_config, tiny_model

TOKENS = [(i * 31 + 11) % 509 for i in range(70)]
# Two layers of width 64 (norms, q k v, o, gate and up, 128 for down) with attention over all
# tokens, and the head.
BOUND = sum_bound(2 * (5 * 64 + 128 + 16 + 2 * len(TOKENS)) + 2 * 64)


@pytest.fixture(scope="module")
def japanese(tmp_path_factory):
    """A tiny Japanese GPT-NeoX, which cpuserve has no family file for."""
    assert find_model("GPTNeoXJapaneseForCausalLM") is None
    torch.manual_seed(0)
    config = transformers.GPTNeoXJapaneseConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_multiple_size=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=[2, 7],
        architectures=["GPTNeoXJapaneseForCausalLM"],
    )
    path = tmp_path_factory.mktemp("japanese")
    transformers.utils.logging.disable_progress_bar()
    transformers.GPTNeoXJapaneseForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_reads_later_tokens_is_refused(tmp_path, dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    for decodes in (False, True):
        config = transformers.BertConfig(
            **sizes, intermediate_size=96, initializer_range=0.3, is_decoder=decodes
        )
        path = tmp_path / str(decodes)
        transformers.BertLMHeadModel(config).save_pretrained(path)
        if decodes:
            executor_of(path, dtype=dtype).close()
        else:
            with pytest.raises(ModelError, match=r'BertLMHeadModel reads later .* "is_decoder"'):
                executor_of(path, dtype=dtype)


def executor_of(path, **changes):
    config = fake_config(
        model_path=str(path), max_num_batched_tokens=128, block_size=32, kv_blocks=16, **changes
    )
    return TransformersExecutor(config)


@pytest.fixture(params=["japanese", "mistral", "opt"])
def checkpoint(request, japanese):
    return japanese if request.param == "japanese" else tiny_model(request.param)


def test_chunks_of_several_sequences_give_the_logits_of_one_pass(checkpoint):
    model = executor_of(checkpoint)._model
    a, b = Sequence(0, list(TOKENS), [9, 2, 4]), Sequence(1, TOKENS[5:50], [0, 7])
    first = model.hidden(step(a.chunk(33, all_rows(33)), b.chunk(40, [])))
    second = model.hidden(step(b.chunk(), a.chunk(None, all_rows(37))))
    expected = transformers_logits(checkpoint, TOKENS)
    bound = BOUND * largest(expected)
    torch.testing.assert_close(torch.cat([first, second[1:]]), expected, atol=bound, rtol=0)
    alone = transformers_logits(checkpoint, TOKENS[5:50])[-1]
    torch.testing.assert_close(second[0], alone, atol=bound, rtol=0)


def test_a_model_that_has_a_program_is_said_to_run_so_as_asked(caplog):
    executor_of(tiny_model("llama"), architecture="LlamaForCausalLM").close()
    assert "LlamaForCausalLM runs through transformers, as requested" in caplog.text


def test_greedy_generation_survives_a_preemption(japanese, caplog):
    executor = executor_of(japanese, architecture="GPTNeoXJapaneseForCausalLM")
    assert (
        "GPTNeoXJapaneseForCausalLM runs through transformers, "
        "because cpuserve does not implement it" in caplog.text
    )
    tokens, sequence = list(TOKENS[:30]), Sequence(0, list(TOKENS[:30]), [3, 1])
    executor.admit(0, SlotRequest(SamplingParams(temperature=0), 0, tokens, [], []))
    for i in range(8):
        if i == 4:
            executor.release(0)
            executor.admit(
                1, SlotRequest(SamplingParams(temperature=0), 0, tokens, sequence.tokens[30:], [])
            )
            sequence = Sequence(1, sequence.tokens, [6, 3])
        sequence.tokens.append(int(executor.step(step(sequence.chunk())).tokens[0]))
    logits = transformers_logits(japanese, sequence.tokens)[len(tokens) - 1 : -1]
    assert_likeliest(sequence.tokens[len(tokens) :], logits, BOUND)
    executor.close()


def test_a_step_out_of_range_is_refused(japanese):
    executor = executor_of(japanese)
    with pytest.raises(ValueError, match="not admitted"):
        executor.step(step(Sequence(0, [1], [0]).chunk()))
    executor.admit(0, SlotRequest(SamplingParams(), 0, [], [], []))
    with pytest.raises(ValueError, match="block id"):
        executor.step(step(Sequence(0, [1], [16]).chunk()))
    with pytest.raises(ValueError, match="no program ops"):
        executor.tap(step(Sequence(0, [1], [0]).chunk()), 0)


def test_code_in_a_checkpoint_is_never_run(japanese, tmp_path):
    for file in japanese.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    marker = tmp_path / "ran"
    (tmp_path / "m.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(ModelError, match="transformers cannot load") as error:
        executor_of(tmp_path)
    assert not marker.exists()
    assert "\n" not in str(error.value)


def test_pickled_weights_are_never_read(japanese, tmp_path):
    (tmp_path / "config.json").write_bytes((japanese / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ModelError, match="transformers cannot load"):
        executor_of(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    path = tiny_model("llama")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match=r"lacks 9 tensors of the model: model\.layers\.2\."):
        executor_of(tmp_path)


def test_a_model_with_other_state_than_keys_and_values_is_refused(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=512, hidden_size=32, num_hidden_layers=1, architectures=["MambaForCausalLM"]
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="other state than keys and values"):
        executor_of(tmp_path)


def test_a_gguf_cannot_run_through_transformers(tmp_path):
    with pytest.raises(ModelError, match="no model directory"):
        executor_of(tmp_path / "model.gguf")


def test_the_numbers_of_an_unknown_architecture_are_read_under_any_name(japanese):
    spec = generic_spec(json.loads((japanese / "config.json").read_text()))
    assert (spec.architecture, spec.vocab, spec.layers) == ("GPTNeoXJapaneseForCausalLM", 512, 2)
    assert (spec.q_heads, spec.kv_heads, spec.head_dim) == (4, 4, 16)
    assert (spec.max_position, spec.eos_ids) == (256, (2, 7))
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 99,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_positions": 1024,
    }
    spec = generic_spec(gpt2)
    assert (spec.width, spec.layers, spec.q_heads, spec.head_dim) == (48, 3, 6, 8)
    assert (spec.intermediate, spec.max_position) == (192, 1024)
    nested = {"architectures": ["X"], "text_config": {**gpt2, "eos_token_id": 5}}
    assert generic_spec(nested).eos_ids == (5,)
    with pytest.raises(ModelError, match="num_hidden_layers is None"):
        generic_spec({**gpt2, "n_layer": None})


def test_who_runs_an_architecture_is_decided_without_importing_transformers(japanese):
    assert read_spec(json.loads((japanese / "config.json").read_text()))[1] is False
    assert read_spec(tiny_config("llama"))[1] is True
    for kind in ("no_such_type", "../gpt_neox", None):
        unknown = {"architectures": ["NoSuchForCausalLM"], "model_type": kind}
        with pytest.raises(ModelError, match="`cpuserve models` lists the "):
            read_spec(unknown)


def test_the_engine_serves_an_architecture_without_a_program(japanese):
    config = fake_config(
        model_path=str(japanese),
        architecture="GPTNeoXJapaneseForCausalLM",
        model_impl="transformers",
        block_size=32,
        kv_blocks=16,
    )
    core = build_engine(config)
    assert isinstance(core.executor, TransformersExecutor)
