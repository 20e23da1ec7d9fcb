"""Published files of DBRX, which have flat matrices of experts."""

from __future__ import annotations

import pytest

from cpuserve import LLM, SamplingParams
from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint
from cpuserve.loader.quantized import quantize_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.quant import dequantize
from tests.helpers.dbrx import flat
from tests.helpers.tiny import tiny_config, tiny_model


def test_each_expert_of_a_published_file_has_its_rows():
    one, other = open_checkpoint(tiny_model("dbrx")), open_checkpoint(flat(tiny_model("dbrx")))
    program = build_program(spec_from_config(other.config))
    check_weights(program, other.weights)
    assert other.weights.names() == one.weights.names()
    for name in sorted(one.weights.names()):
        assert (dequantize(other.weights.get(name)) == dequantize(one.weights.get(name))).all()
        assert other.weights.kind(name, "float32") == one.weights.kind(name, "float32")


@pytest.mark.parametrize("quantization", ["none", pytest.param("int4", marks=pytest.mark.deep)])
def test_a_published_file_gives_the_answers_of_separate_experts(quantization):
    def answer(path):
        with LLM(str(path), max_model_len=64, quantization=quantization) as llm:
            params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
            return llm.generate("a mixture of fine-grained experts", params)[0].outputs[0].token_ids

    assert answer(flat(tiny_model("dbrx"))) == answer(tiny_model("dbrx"))


def test_the_base_of_rotations_is_that_of_published_files():
    wanted = tiny_config("dbrx")
    published = {**wanted, "rope_theta": None}
    assert spec_from_config(published) == spec_from_config(wanted)


def test_flat_matrices_cannot_be_written_quantized(tmp_path):
    source, program = flat(tiny_model("dbrx")), build_program(spec_from_config(tiny_config("dbrx")))
    with pytest.raises(ModelError, match="stores the matrices of all experts as one tensor"):
        quantize_checkpoint(source, tmp_path / "q", program, "int8", 1, lambda *_: None)
