"""Each option of vLLM 0.33 is honoured, without effect, or refused with the reason.

tests/data/vllm_options.json has the names in its EngineArgs, AsyncEngineArgs and FrontendArgs,
and the flags that its parser adds for them.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from cpuserve import LLM, EngineArgs
from cpuserve.base.errors import ConfigError
from cpuserve.cli.flags import normalize
from cpuserve.cli.main import build_parser
from cpuserve.config.fields import BY_NAME, FIELDS, no_op_flags
from cpuserve.config.missing import why_missing
from tests.helpers.tiny import tiny_model

OPTIONS = json.loads((Path(__file__).parents[1] / "data/vllm_options.json").read_text())
KNOWN = {flag for field in FIELDS for flag in (*field.all_flags, *field.bare_flags)}
NO_OPS = no_op_flags()


def parsed(*words):
    """The options of a command line, and the words that the parser does not know."""
    args, unknown = build_parser().parse_known_args(normalize(["serve", "model", *words]))
    return args, unknown


@pytest.mark.parametrize("flag", OPTIONS["engine_flags"])
def test_a_flag_of_the_engine_is_not_unknown(flag):
    assert flag in KNOWN or flag in NO_OPS or why_missing(flag)


@pytest.mark.parametrize("name", OPTIONS["frontend_fields"])
def test_a_field_of_the_front_end_is_not_unknown(name):
    flag = "--" + name.replace("_", "-")
    assert flag in KNOWN or flag in NO_OPS or why_missing(flag)


def test_no_flag_is_in_two_tables():
    assert not KNOWN & set(NO_OPS)
    assert not {flag for flag in {*KNOWN, *NO_OPS} if why_missing(flag) and flag[2:5] != "no-"}


def test_a_dataclass_has_the_fields_of_vllm():
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(OPTIONS["engine_fields"]) <= names
    args = EngineArgs(model="a", limit_mm_per_prompt={"image": 1}, skip_mm_profiling=True)
    given = {name: value for name, value in dataclasses.asdict(args).items() if value is not None}
    assert given == {
        "model": "a", "limit_mm_per_prompt": {"image": 1}, "skip_mm_profiling": True,
    }  # fmt: skip


def test_a_model_is_made_of_engine_args():
    path = str(tiny_model("llama"))
    args = EngineArgs(model=path, max_model_len=64, mm_processor_cache_gb=0, enforce_eager=True)
    for make in (lambda: LLM.from_engine_args(args), lambda: LLM(**dataclasses.asdict(args))):
        with make() as llm:
            assert llm.config.max_model_len == 64
    refused = dataclasses.replace(args, numa_bind=True)
    with pytest.raises(ConfigError, match="--omp-threads-bind"):
        LLM.from_engine_args(refused)


PICTURES = [
    (["--limit-mm-per-prompt", '{"image": 2, "video": 0, "audio": 0}'], 2),
    (["--limit-mm-per-prompt", '{"image": {"count": 5, "width": 512, "height": 512}}'], 5),
    (["--limit-mm-per-prompt", '{"video": 1}'], 64),
    (["--limit-mm-per-prompt.image", "2", "--limit-mm-per-prompt.video=0"], 2),
    (["--limit_mm_per_prompt.image.count", "3"], 3),
    (["--limit-mm-per-prompt", '{"image": 1, "audio": 0}', "--limit-mm-per-prompt.image", "9"], 9),
]


@pytest.mark.parametrize(("words", "most"), PICTURES)
def test_limits_of_pictures_are_read_as_vllm_writes_them(words, most):
    from cpuserve.config.server import most_pictures

    args, unknown = parsed(*words)
    assert not unknown
    given = args.given["limit_mm_per_prompt"]
    assert most_pictures(BY_NAME["limit_mm_per_prompt"].parse(given.value), 64) == most


@pytest.mark.parametrize(
    "value", ['{"image": -1}', '{"image": 1.5}', '{"smell": 1}', '{"video": -1}']
)
def test_a_wrong_limit_of_pictures_is_refused(value):
    with pytest.raises(ValueError, match="image"):
        BY_NAME["limit_mm_per_prompt"].parse(value)


def test_dotted_keys_become_one_object_for_every_option_of_json():
    words = [
        *("--mm-processor-kwargs.size.longest_edge", "1024", "--speculative-config.method=ngram"),
        *("--speculative-config.num_speculative_tokens", "4", "-cc.mode", "3"),
        *("--override-generation-config.stop+", '"a"', "--override-generation-config.stop+=b"),
    ]
    assert normalize(["serve", *words]) == [
        "serve",
        '--mm-processor-kwargs={"size": {"longest_edge": 1024}}',
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 4}',
        '-cc={"mode": 3}',
        '--override-generation-config={"stop": ["a", "b"]}',
    ]
    args, unknown = parsed(*words)
    assert not unknown
    assert any("compilation" in note or "-cc" in note for note in args.notes)


@pytest.mark.parametrize(
    "words",
    [
        ["--limit-mm-per-prompt.image"],
        ["--limit-mm-per-prompt..image", "1"],
        ["--limit-mm-per-prompt." + "a." * 20 + "b", "1"],
        ["--limit-mm-per-prompt.a", "1", "--limit-mm-per-prompt.a.b", "1"],
    ],
)
def test_a_wrong_dotted_key_is_one_line(words):
    with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
        normalize(["serve", *words])


def test_a_picture_command_of_vllm_starts_with_a_line_for_each_flag_without_effect():
    words = [
        *("--mm-processor-cache-gb", "0", "--mm-encoder-tp-mode", "data", "--skip-mm-profiling"),
        *("--mm-processor-cache-type", "shm", "--mm-encoder-attn-backend", "TORCH_SDPA"),
        *("--media-io-kwargs", '{"video": {"num_frames": -1}}', "--interleave-mm-strings"),
        *("--async-scheduling", "--enable-flashinfer-autotune", "--no-monokernel"),
    ]
    args, unknown = parsed(*words)
    assert not unknown
    assert len(args.notes) == sum(word.startswith("--") for word in words)
