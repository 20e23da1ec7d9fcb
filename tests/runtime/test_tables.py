"""Untied tables stay in their files, and the rows that are looked up there have the same bits."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.config.options import EngineOptions
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.prepare import model_facts
from cpuserve.program.operations.dense import looked_up
from cpuserve.quant import quantize_online
from cpuserve.quant.base import BuiltTensor
from cpuserve.quant.gguf.blocks import QUANTIZED
from cpuserve.quant.gguf.converted import CONVERTED
from cpuserve.quant.gguf.sizes import BUILT, packed_bytes
from tests.helpers.checkpoint_logits import native_logits, program_of
from tests.helpers.depth import deep_but
from tests.helpers.gguf_blocks import write_model
from tests.helpers.levels import LEVELS, each_level
from tests.helpers.tiny import tiny_model

SIZES = [1, 40, 3, 26]  # of steps: fewer rows than a panel has, and more
EMBEDDING = "model.embed_tokens.weight"


def check_same(checkpoint, isa=LEVELS[-1], names=(EMBEDDING,), **options):
    """The logits with mapped tables are those with packed ones; the tables take no memory."""
    packed, whole = native_logits(checkpoint, isa, SIZES, **options)
    got, lowered = native_logits(checkpoint, isa, SIZES, mapped=True, **options)
    assert np.array_equal(got, packed)
    assert not whole.tables
    assert [table.name for table in lowered.tables] == list(names)
    assert not {name for m in lowered.matrices for name in m.names} & set(names)
    assert lowered.native.weight_bytes < whole.native.weight_bytes


def untied(family="llama", **config):
    return tiny_model(family, tie_word_embeddings=False, **config)


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_of_dense_tables_have_the_bits_of_packed_ones(stored, dtype):
    check_same(open_checkpoint(untied(dtype=stored)), dtype=dtype)


@each_level
def test_rows_have_the_same_bits_at_every_level(isa):
    check_same(open_checkpoint(untied(dtype="bfloat16")), isa, dtype="bfloat16")


@pytest.mark.parametrize("scheme", ["int8", "int4", "int8_fine", "w8a8"])
def test_rows_that_are_quantized_when_they_are_looked_up_have_the_same_bits(scheme):
    checkpoint = open_checkpoint(untied(dtype="bfloat16"))
    quantized = quantize_online(checkpoint.weights, program_of(checkpoint), scheme)
    check_same(dataclasses.replace(checkpoint, weights=quantized), dtype="bfloat16")


@pytest.mark.parametrize(
    "dtype", deep_but(["Q8_0", "Q4_K", "IQ4_XS", "MXFP4"], sorted(QUANTIZED.keys() - {"NVFP4"}))
)
def test_rows_of_gguf_tables_have_the_same_bits(dtype, tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, {"": "Q8_0", "token_embd.weight": dtype, "output.weight": "Q8_0"})
    check_same(open_checkpoint(path))


def test_every_rank_looks_rows_up_in_the_same_file():
    check_same(open_checkpoint(untied(dtype="bfloat16")), ranks=[1, 1])


def test_tables_of_layers_stay_in_the_file_too():
    checkpoint = open_checkpoint(tiny_model("gemma3n", dtype="bfloat16"))
    names = looked_up(build_program(spec_from_config(checkpoint.config)))
    assert [name.split(".")[-2] for name in names] == ["embed_tokens_per_layer"]
    check_same(checkpoint, names=names, dtype="bfloat16")


@pytest.mark.parametrize("odd", range(1, 4))
def test_tables_may_begin_at_any_byte_of_a_file(odd, tmp_path):
    """The header of safetensors has any length, so tensors lie anywhere."""
    source, path = untied(dtype="float32"), tmp_path / "model"
    shutil.copytree(source, path)
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    header += b" " * ((odd - len(header)) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights.get(EMBEDDING).data.ctypes.data % 8 == odd
    check_same(checkpoint)
    mapped, _ = native_logits(checkpoint, LEVELS[-1], SIZES, mapped=True)
    aligned, _ = native_logits(open_checkpoint(source), LEVELS[-1], SIZES)
    assert np.array_equal(mapped, aligned)


def test_a_tied_table_is_packed_since_the_output_multiplies_it():
    checkpoint = open_checkpoint(tiny_model("llama", tie_word_embeddings=True))
    _, lowered = native_logits(checkpoint, LEVELS[-1], SIZES, mapped=True)
    assert not lowered.tables


def test_rows_that_have_to_be_built_are_packed(tmp_path):
    for dtype in (*CONVERTED, "NVFP4"):
        path = tmp_path / f"{dtype}.gguf"
        write_model(path, {"": "Q8_0", "token_embd.weight": dtype, "output.weight": "Q8_0"})
        checkpoint = open_checkpoint(path)
        assert isinstance(checkpoint.weights.get(EMBEDDING), BuiltTensor)
        assert dtype in BUILT
    assert {*BUILT} == {*CONVERTED, "NVFP4"}
    assert not {*BUILT} & (QUANTIZED.keys() - {"NVFP4"})


def test_nothing_multiplies_a_table():
    program = _C.Program(LEVELS[0], 4, 1)
    x, out = (program.value(name, 32, "f32") for name in ("x", "out"))
    table = program.table("table", "dense_f32", 64, 32)
    program.embed(x, table, 1.0)
    with pytest.raises(ValueError, match="table is a table for embed"):
        program.linear(x, out, table, -1, "none", False, False, 0)
    executor = _C.Executor(_C.Team(1, []), program, 1, "f32", 1)
    rows = np.zeros((64, 128), np.uint8)
    with pytest.raises(ValueError, match="is gathered, and not packed"):
        executor.load_matrix(table, [(rows, "f32", None)])
    with pytest.raises(ValueError, match="has 63 rows, not 64"):
        executor.load_table(table, rows[:63], "f32")


def facts_of(path):
    return model_facts(EngineOptions(model=str(path)), path)[1]


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_the_memory_plan_knows_which_tables_are_mapped(stored):
    path = untied(dtype=stored)
    table = open_checkpoint(path).weights.get(EMBEDDING)
    assert facts_of(path).table_bytes == table.nbytes
    assert facts_of(tiny_model("llama", tie_word_embeddings=True)).table_bytes == 0


@pytest.mark.parametrize(
    ("dtype", "mapped"),
    [("Q4_0", True), ("Q4_K", True), ("IQ3_XXS", True), ("TQ2_0", True), ("TQ1_0", False)],
)
def test_the_memory_plan_counts_the_tables_of_gguf_files_as_it_counts_files(
    dtype, mapped, tmp_path
):
    path = tmp_path / "model.gguf"
    types = {"": "Q8_0", "token_embd.weight": dtype, "output.weight": "Q8_0"}
    write_model(path, types, vocab=96)
    facts = facts_of(path)
    table = open_checkpoint(path).gguf.tensors["token_embd.weight"]
    assert facts.table_bytes == (packed_bytes(dtype, table.size) if mapped else 0)
    assert facts.vocab == 96
    assert facts.rope_columns == 64


def anonymous():
    """Bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps")
def test_a_mapped_table_takes_no_memory_of_its_own(tmp_path):
    path, vocab, width = tmp_path / "model.gguf", 65536, 256
    write_model(path, {"": "Q8_0"}, width=width, vocab=vocab)
    table = vocab * width // 32 * 34

    def held(mapped):
        """What a table of its type takes in an executor."""
        checkpoint = open_checkpoint(path)
        program = _C.Program(LEVELS[-1], 4, 1)
        x = program.value("x", width, "f32")
        make = (vocab, width) if mapped else (vocab, width, [vocab], False)
        add = program.table if mapped else program.matrix
        matrix = add("table", "w8_g32", *make)
        program.embed(x, matrix, 1.0)
        before = anonymous()
        executor = _C.Executor(_C.Team(1, []), program, 1, "f32", 1)
        tensor = checkpoint.weights.get(EMBEDDING)
        if mapped:
            executor.load_table(matrix, tensor.data, tensor.source)
        else:
            executor.load_matrix(matrix, [(tensor.data, tensor.source, None)])
        return anonymous() - before

    assert held(mapped=False) >= table
    assert held(mapped=True) < table / 4
