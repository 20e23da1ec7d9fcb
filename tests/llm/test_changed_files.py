"""Files that change while an engine reads them: no crash, and no tokens of the new content."""

import os
import shutil

import pytest

from cpuserve import LLM
from cpuserve.base.errors import EngineDead, SourceChanged
from tests.helpers.gguf_convert import convert
from tests.helpers.tiny import tiny_model
from tests.llm.test_expert_pool import (
    PROMPTS,
    add,
    all_prompts,
    of_experts,
    parts,
    run,
    with_engine,
)

SIZES = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
OTHER = [[n + 400] for n in range(3)]  # these tokens are in no other prompt


pytestmark = pytest.mark.usefixtures("folder")


def cut(file):
    with file.open("r+b") as stream:
        stream.truncate(0)


def overwrite(file):
    with file.open("r+b") as stream:
        stream.write(bytes(byte ^ 16 for byte in file.read_bytes()))


def overwrite_and_restore_the_time(file):
    before = file.stat()
    overwrite(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(file):
    os.utime(file)


def move_over(file):
    other = file.with_name("other")
    shutil.copyfile(file, other)
    overwrite(other)
    other.rename(file)


def untied(tmp_path, kind):
    """Return a model with rows of embeddings that stay in its file, and this file."""
    dtype = "float32" if kind == "gguf" else "bfloat16"
    made = tiny_model("qwen3-moe", dtype=dtype, tie_word_embeddings=False)
    if kind == "gguf":
        convert("qwen3moe", str(file := tmp_path / "m.gguf"), source=made)
        return file, file
    path = shutil.copytree(made, tmp_path / "model")
    return path, path / "model.safetensors"


def engine_of(path, **options):
    with LLM(str(path), executor="native", **SIZES, **options) as llm:
        return llm.config


def others(core):
    for number, prompt in enumerate(OTHER):
        add(core, number, prompt)
    return run(core)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
@pytest.mark.parametrize("change", [cut, overwrite, overwrite_and_restore_the_time])
def test_rows_of_a_file_that_has_changed_are_not_computed_with(tmp_path, kind, change):
    path, file = untied(tmp_path, kind)
    config = engine_of(path, weights_on_disk="64MiB")
    config = of_experts(config, with_engine(config, parts), 0.4)

    def use(core):
        assert core.executor.lowered.tables
        all_prompts(core)
        add(core, 1, PROMPTS[1])
        core.step()
        change(file)
        with pytest.raises(SourceChanged, match=rf"{file.name} .* was changed .* start cpuserve"):
            core.step()

    with_engine(config, use)


@pytest.mark.parametrize("change", [touch, move_over])
def test_a_file_that_is_touched_or_replaced_by_a_rename_is_read_on(tmp_path, change):
    path, file = untied(tmp_path, "safetensors")
    config = engine_of(path, weights_on_disk="64MiB")
    expected = with_engine(config, others)

    def use(core):
        all_prompts(core)
        change(file)
        return others(core)

    assert with_engine(config, use) == expected


def change_in_steps(core, file, monkeypatch):
    """Let each step of an engine begin before other bytes are written into the file."""
    native = core.executor.native

    class Changed:
        def __getattr__(self, name):
            return getattr(native, name)

        def step(self, *words):
            overwrite(file)
            native.step(*words)

    monkeypatch.setattr(core.executor, "native", Changed())


def test_a_file_that_changes_during_a_step_gives_no_tokens(tmp_path, monkeypatch):
    path, file = untied(tmp_path, "safetensors")
    config = engine_of(path, weights_on_disk="64MiB")

    def use(core):
        add(core, 1, PROMPTS[1])
        change_in_steps(core, file, monkeypatch)
        with pytest.raises(SourceChanged):
            core.step()

    with_engine(config, use)


@pytest.mark.parametrize("change", [cut, overwrite, overwrite_and_restore_the_time])
def test_mapped_weights_that_have_changed_are_not_computed_with(folder, change):
    config = engine_of(tiny_model("qwen3-moe", dtype="bfloat16"), weights_on_disk="always")
    expected = with_engine(config, others)

    def use(core):
        (file,) = folder.glob("*.weights")
        touch(file)  # as other engines do that open it
        assert others(core) == expected
        change(file)
        add(core, 1, PROMPTS[1])
        with pytest.raises(SourceChanged, match=r"\.weights .* was changed"):
            core.step()

    with_engine(config, use)
    assert with_engine(config, others) == expected  # the file is made anew


@pytest.mark.usefixtures("patient_closes")
@pytest.mark.parametrize("moment", ["before", "during"])
def test_no_block_of_a_step_with_changed_weights_is_kept(folder, tmp_path, monkeypatch, moment):
    """The end of an engine writes blocks to the disk, where later starts find them."""
    kept = tmp_path / "kept"
    options = {"weights_on_disk": "always", "prefix_cache_dir": str(kept)}
    config = engine_of(tiny_model("qwen3-moe", dtype="bfloat16"), **options)
    prompt = [(7 * i) % 300 + 5 for i in range(70)]

    def ask(core):
        add(core, 1, prompt)
        return run(core)

    def use(core):
        (file,) = folder.glob("*.weights")
        if moment == "before":
            overwrite(file)
        else:
            change_in_steps(core, file, monkeypatch)
        add(core, 1, prompt)
        with pytest.raises(SourceChanged):
            core.step()

    with_engine(config, use)
    assert not [*kept.rglob("*.kv")]
    found = with_engine(config, ask)
    assert [*kept.rglob("*.kv")]
    shutil.rmtree(kept)
    assert with_engine(config, ask) == found


def test_an_engine_ends_with_the_reason(tmp_path):
    path, file = untied(tmp_path, "safetensors")
    with LLM(str(path), executor="native", weights_on_disk="64MiB", **SIZES) as llm:
        llm.generate(PROMPTS, use_tqdm=False)
        overwrite(file)
        with pytest.raises(EngineDead, match=r"model.safetensors .* was changed"):
            llm.generate(OTHER, use_tqdm=False)
