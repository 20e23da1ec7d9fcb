"""The GGUF reader: its results, and an error that names the field for every malformed file."""

import struct

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import TENSOR_TYPES, GgufFile, foreign_type
from cpuserve.loader.gguf.model import gguf_config, pair_row_order
from cpuserve.loader.load import open_checkpoint, read_config
from tests.helpers import gguf_file as make
from tests.helpers.gguf_blocks import UNKNOWN
from tests.helpers.gguf_file import ARRAY, BOOL, F32, I32, STRING, U32, U64, gguf

ROW = bytes(128)


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


SCALARS = [
    ("u8", 0, 200), ("i8", 1, -5), ("u16", 2, 60000), ("i16", 3, -300), ("u32", U32, 2**32 - 1),
    ("i32", I32, -7), ("f32", F32, 0.5), ("bool", BOOL, 1), ("string", STRING, "wörld"),
    ("u64", U64, 2**64 - 1), ("i64", 11, -(2**62)), ("f64", 12, 1e300),
    ("strings", ARRAY, (STRING, ["a", "", "é"])), ("ints", ARRAY, (I32, [1, -2, 3])),
    ("bools", ARRAY, (BOOL, [1, 0])), ("empty", ARRAY, (U32, [])),
]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read_back(path, version):
    file = GgufFile(write(path, gguf(SCALARS, version=version)))
    for key, kind, item in SCALARS:
        wanted = item[1] if kind == ARRAY else item
        assert file.value(key) == wanted
    assert file.value("bool") is True
    assert file.value("absent") is None
    assert file.count("strings") == 3
    assert file.keys() == [key for key, _, _ in SCALARS]


def test_positions_of_texts_are_found_without_the_others(path):
    texts = ["ab", "\u00e9", "", "cd", "ab", "\u6f22"]
    path.write_bytes(make.gguf([("t", make.ARRAY, (make.STRING, texts)), ("n", make.STRING, "ab")]))
    file = GgufFile(path)
    assert file.positions("t", ["ab", "\u6f22", "\u00e8", ""]) == {"ab": 4, "": 2, "\u6f22": 5}
    for key, wanted in (("t", []), ("n", ["ab"]), ("absent", ["ab"])):
        assert file.positions(key, wanted) == {}


def test_tensor_table_has_reversed_dims_and_the_files_bytes(path):
    data = np.arange(12, dtype="<f4").tobytes()
    file = GgufFile(write(path, gguf((), [("t", (4, 3), 0, data), ("h", (32,), 8, bytes(34))])))
    tensor = file.tensors["t"]
    assert (tensor.shape, tensor.dtype, tensor.size) == ((3, 4), "F32", 48)
    assert file.data(tensor).tobytes() == data
    assert file.tensors["h"].dtype == "Q8_0"
    assert file.tensors["h"].offset % 32 == 0


def test_general_alignment_moves_the_data(path):
    values = [("general.alignment", U32, 128)]
    file = GgufFile(write(path, gguf(values, [("t", (4,), 0, b"abcd" * 4)], alignment=128)))
    assert file.tensors["t"].offset % 128 == 0
    assert file.data(file.tensors["t"]).tobytes() == b"abcd" * 4


def one(name=b"t", dims=(4,), kind=0, offset=0, data=ROW):
    head = gguf((), (), counts=(1, 0))[:24]
    out = head + make.row(name, dims, kind, offset)
    return out + bytes(-len(out) % 32) + data


def key_bytes(raw_key, kind=U32, payload=b"\1\0\0\0"):
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw_key + struct.pack("<I", kind) + payload


ARRAY_HEAD = struct.pack("<IQ", STRING, 2**60)
MALFORMED = {
    "empty": (b"", "empty"),
    "bad magic": (b"GGML" + bytes(60), "magic"),
    "magic alone": (b"GGUF", "version"),
    "zip": (b"PK\3\4" + bytes(60), "magic"),
    "version 0": (gguf(version=0), "version"),
    "version 1": (gguf(version=1), "version"),
    "version 4": (gguf(version=4), "version"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "tensor count": (gguf(counts=(2**63, 0)), "tensor count"),
    "tensor count -1": (gguf(counts=(2**64 - 1, 0)), "tensor count"),
    "metadata count": (gguf(counts=(0, 2**63)), "metadata count"),
    "metadata count too many": (gguf(counts=(0, 1)) + bytes(8), "metadata"),
    "key size 0": (key_bytes(make.text("")), "key 0 size"),
    "key size huge": (key_bytes(struct.pack("<Q", 2**64 - 1) + b"abcdefgh"), "key 0 size"),
    "key size beyond file": (key_bytes(struct.pack("<Q", 60000) + b"abc"), "key 0"),
    "key not UTF-8": (key_bytes(make.text(b"\xff\xfe")), "UTF-8"),
    "key with a line break": (key_bytes(make.text("a\nb")), "not printable"),
    "value type": (key_bytes(make.text("k"), 13), "k type"),
    "value type huge": (key_bytes(make.text("k"), 2**32 - 1), "k type"),
    "boolean 2": (gguf([("k", BOOL, 2)]), "k"),
    "string beyond file": (key_bytes(make.text("k"), STRING, struct.pack("<Q", 2**40)), "k"),
    "string size wraps": (key_bytes(make.text("k"), STRING, struct.pack("<Q", 2**64 - 8)), "k"),
    "nested array": (gguf([("k", ARRAY, (ARRAY, []))]), "k element type"),
    "array length": (key_bytes(make.text("k"), ARRAY, ARRAY_HEAD), "k length"),
    "numbers length": (key_bytes(make.text("k"), ARRAY, struct.pack("<IQ", 12, 2**61)), "k length"),
    "duplicate key": (gguf([("k", U32, 1), ("k", U32, 2)]), "k: the key occurs twice"),
    "alignment 0": (gguf([("general.alignment", U32, 0)]), "general.alignment"),
    "alignment 3": (gguf([("general.alignment", U32, 3)]), "general.alignment"),
    "alignment type": (gguf([("general.alignment", U64, 32)]), "general.alignment"),
    "name size 0": (one(name=b""), "tensor 0 name"),
    "name size 65": (one(name=b"n" * 65), "tensor 0 name"),
    "name with a terminal command": (one(name=b"a\x1b[2J"), "not printable"),
    "dims 0": (one(dims=()), "dimensions"),
    "dims 5": (one(dims=(1,) * 5), "dimensions"),
    "ne 0": (one(dims=(0, 4)), "size 0"),
    "ne product wraps": (one(dims=(2**33, 2**31)), "size 1"),
    "ne product wraps to zero": (one(dims=(2**32, 2**32)), "size 1"),
    "ne negative": (one(dims=(2**64 - 1,)), "size 0"),
    "bytes wrap": (one(dims=(2**62,)), "offset"),
    "row no whole blocks": (one(dims=(33,), kind=8), "size 0"),
    "type removed": (one(kind=4), "type"),
    "type unknown": (one(kind=255), "type"),
    "offset unaligned": (one(offset=8), "offset"),
    "offset of another alignment": (
        gguf(
            [("general.alignment", U32, 128)],
            [("a", (4,), 0, ROW[:16]), ("b", (64,), 0, ROW[:32] * 8)],
            alignment=32,
        ),
        "multiple of the alignment 128",
    ),
    "data of another alignment": (
        gguf([("general.alignment", U32, 4096)], [("t", (4,), 0, ROW)], alignment=32),
        "ends at byte",
    ),
    "offset beyond file": (one(offset=2**20), "offset"),
    "offset wraps": (one(offset=2**64 - 32), "offset"),
    "data cut": (one(data=ROW[:15]), "offset"),
    "duplicate tensor": (gguf((), [("t", (4,), 0, ROW[:16])] * 2), "occurs twice"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_with_the_field(path, case):
    data, field = MALFORMED[case]
    with pytest.raises(ModelError) as caught:
        GgufFile(write(path, data))
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (140, "IQ5_K, a type of ik_llama.cpp"),
        (97, "Q8_0_X4, a type of ik_llama.cpp"),
        (144, "IQ4_KS, a type of ik_llama.cpp"),
        (158, "IQ1_KT, a type of ik_llama.cpp"),
        (99, "Q8_2_X4, a type of ik_llama.cpp"),
        (100, "a type of ik_llama.cpp or another fork of llama.cpp"),
        (202, r"a repacked type of ik_llama.cpp \(_R4, _R8 or _R16\)"),
        (399, "a repacked type of ik_llama.cpp"),
        (4, "Q4_2, a type that llama.cpp removed"),
        (33, "Q4_0_8_8, a type that llama.cpp removed,"),
        (36, r"IQ4_NL_4_4, a type that llama.cpp removed \(or I2_S of bitnet.cpp\)"),
    ],
)
def test_a_type_of_another_program_is_named_with_what_to_do(path, kind, what):
    wanted = rf"^GGUF .*: tensor t has type {kind}, {what}.* is not supported; supported: F32, .*"
    with pytest.raises(ModelError, match=wanted) as caught:
        GgufFile(write(path, one(kind=kind)))
    message = str(caught.value)
    assert "broken" not in message
    for word in (
        " IQ4_XS,",
        " Q4_K,",
        " Q1_0,",
        " Q2_0,",
        " PTQ1_0;",
        " IQ1_S",
        "; download the model as Q4_K_M or",
    ):
        assert word in message


@pytest.mark.parametrize("kind", [43, 96, 159, 201, 400, 2**32 - 1])
def test_a_number_of_no_program_is_no_tensor_type(path, kind):
    wanted = f"^broken GGUF .*: tensor t type: {kind} is not a known tensor type$"
    with pytest.raises(ModelError, match=wanted):
        GgufFile(write(path, one(kind=kind)))


def test_every_number_of_the_gguf_package_is_known():
    names = {t.value: t.name for t in gguf_package.GGMLQuantizationType}
    names |= {number: name for name, number in UNKNOWN.items()}
    assert names == {number: name for number, (name, _, _) in TENSOR_TYPES.items()}
    assert not any(foreign_type(number) for number in TENSOR_TYPES)


def test_overlapping_tensors_are_refused(path):
    table = make.row("a", (16,), 0, 0) + make.row("b", (16,), 0, 32)
    data = gguf((), (), counts=(2, 0))[:24] + table
    with pytest.raises(ModelError, match=r"tensor b offset.*overlaps"):
        GgufFile(write(path, data + bytes(-len(data) % 32) + ROW))


def whole_file():
    rng = np.random.default_rng(0)
    tokens = (STRING, ["a", "b", "ab", "<|im_end|>", "c", "d", "e", "f"])
    more = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, tokens),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1, 1, 3, 1, 1, 1, 1])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.eos_token_id": (U32, 3),
    }
    return gguf(make.tiny_values(**more), make.tiny_tensors(rng))


WHOLE = whole_file()
HEADER = len(WHOLE) - sum(
    -(-len(t[3]) // 32) * 32 for t in make.tiny_tensors(np.random.default_rng(0))
)


def use_everything(path):
    """Open a file, decode all metadata and map all tensors, as a caller may do."""
    from cpuserve.tokenizer.tokenizer import Tokenizer

    file = GgufFile(path)
    for key in file.keys():  # noqa: SIM118
        file.value(key)
    checkpoint = open_checkpoint(path)
    for name in checkpoint.weights.names():
        checkpoint.weights.get(name)
    Tokenizer.load(path).encode("ab c")


def one_line_or_nothing(path):
    """A file with changed bytes is either still valid or refused with an error of one line."""
    message = ""
    try:
        use_everything(path)
    except ModelError as error:
        message = str(error)
    assert message.isprintable()


def test_the_whole_file_is_good(path):
    use_everything(write(path, WHOLE))


def test_truncation_at_every_byte_of_the_header_is_refused(path):
    for size in range(HEADER + 1):
        with pytest.raises(ModelError):
            GgufFile(write(path, WHOLE[:size]))


def test_truncation_in_the_data_is_refused(path):
    with pytest.raises(ModelError, match="truncated"):
        GgufFile(write(path, WHOLE[:-1]))


FUZZ = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(
    changes=st.lists(
        st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_changed_bytes_raise_model_error_or_nothing(path, changes):
    data = bytearray(WHOLE)
    for at, byte in changes:
        data[at] = byte
    one_line_or_nothing(write(path, bytes(data)))


@pytest.mark.deep
@FUZZ
@example(at=736, number=0)  # a missing token, whose error quotes a control character
@given(
    at=st.integers(0, HEADER - 8), number=st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
)
def test_changed_sizes_raise_model_error_or_nothing(path, at, number):
    data = bytearray(WHOLE)
    data[at : at + 8] = struct.pack("<Q", number)
    one_line_or_nothing(write(path, bytes(data)))


def config_of(path, arch="llama", tensors=None, **changes):
    rng = np.random.default_rng(0)
    tensors = make.tiny_tensors(rng) if tensors is None else tensors
    return read_config(write(path, gguf(make.tiny_values(arch, **changes), tensors)))


def test_config_speaks_hugging_face(path):
    config = config_of(path, **{"tokenizer.ggml.eos_token_id": (U32, 3)})
    wanted = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True,
        "torch_dtype": "float32", "eos_token_id": 3, "attention_bias": False,
    }  # fmt: skip
    assert {k: config[k] for k in wanted} == wanted
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("arch", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_config_names_the_qwen_architectures(path, arch, name):
    config = config_of(path, arch, **{f"{arch}.attention.key_length": (U32, 32)})
    assert config["architectures"] == [name]


def test_config_with_an_output_matrix_is_not_tied(path):
    tensors = make.tiny_tensors(np.random.default_rng(0), tied=False)
    assert config_of(path, tensors=tensors)["tie_word_embeddings"] is False


def test_config_reads_rope_scaling(path):
    linear = {
        "llama.rope.scaling.type": (STRING, "linear"),
        "llama.rope.scaling.factor": (F32, 4.0),
    }
    assert config_of(path, **linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = {**linear, "llama.rope.scaling.type": (STRING, "yarn")}
    yarn["llama.rope.scaling.original_context_length"] = (U32, 32)
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config_of(path, **yarn)["rope_scaling"] == wanted


def rope_tensor(values):
    return ("rope_freqs.weight", (len(values),), 0, np.array(values, "<f4").tobytes())


def test_rope_factors_become_explicit_frequencies(path):
    factors = [1.0] * 8 + [8.0] * 8
    tensors = [*make.tiny_tensors(np.random.default_rng(0)), rope_tensor(factors)]
    config = config_of(path, tensors=tensors)
    assert config["rope_scaling"] == {"rope_type": "freq_factors", "freq_factors": factors}
    assert "rope_freqs.weight" not in open_checkpoint(path).weights.names()


@pytest.mark.parametrize("values", [[1.0] * 15, [0.0] * 16, [float("nan")] * 16])
def test_bad_rope_factors_are_refused(path, values):
    tensors = [*make.tiny_tensors(np.random.default_rng(0)), rope_tensor(values)]
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(path, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"general.architecture": (STRING, "other")},
            r"'other' is not supported; `cpuserve models --supported` lists the \d+ that are$",
        ),
        (
            {"general.architecture": (STRING, "plamo2")},
            "'plamo2' is not supported: transformers has no such family. Dense models ",
        ),
        (
            {"general.architecture": (STRING, "gptj")},
            "'gptj' is not supported: give the safetensors of the model",
        ),
        (
            {"general.architecture": (STRING, "eagle3")},
            "'eagle3' is not supported: it is an EAGLE-3 head, .*: give that model, and .* --spec",
        ),
        (
            {"general.architecture": (STRING, "qwen3tts")},
            "'qwen3tts' is not supported: it makes or reads speech: use a server for speech",
        ),
        (
            {"general.architecture": (STRING, "Qwen4")},
            "'Qwen4' is not supported; the nearest are qwen3, qwen2, qwen4exp, and `cpuserve",
        ),
        ({"general.architecture": None}, "architecture None"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": (U32, 0)}, "llama.block_count is 0"),
        ({"llama.attention.head_count": (STRING, "x")}, "head_count is 'x'"),
        ({"llama.attention.head_count": (ARRAY, (U32, [2, 4]))}, "head_count"),
        ({"llama.rope.freq_base": (F32, float("inf"))}, "freq_base is inf"),
        ({"llama.attention.layer_norm_rms_epsilon": (F32, -1.0)}, "epsilon"),
        ({"llama.expert_count": (U32, 8)}, "expert_used_count is missing"),
        ({"llama.attention.value_length": (U32, 16)}, "value_length"),
        ({"split.count": (U32, 3)}, "must be called NAME-00001-of-00003"),
        ({"llama.rope.scaling.type": (STRING, "su")}, "rope.scaling.type is 'su'"),
    ],
)
def test_config_errors_name_the_key(path, change, message):
    with pytest.raises(ModelError, match=message):
        config_of(path, **change)


def test_a_vocabulary_without_a_model_is_refused(path):
    with pytest.raises(ModelError, match="token_embd"):
        config_of(path, tensors=[])


def test_unsupported_type_names_type_tensor_and_supported_ones(path):
    tensors = [
        t for t in make.tiny_tensors(np.random.default_rng(0)) if t[0] != "blk.0.ffn_down.weight"
    ]
    tensors.append(("blk.0.ffn_down.weight", (256, 1), 15, bytes(292)))
    write(path, gguf(make.tiny_values(), tensors))
    assert gguf_config(GgufFile(path))["num_hidden_layers"] == 1
    with pytest.raises(ModelError) as caught:
        open_checkpoint(path)
    for word in (
        "Q8_K",
        "model.layers.0.mlp.down_proj.weight",
        "Q8_0",
        "Q4_1",
        "BF16",
    ):
        assert word in str(caught.value)


def test_a_file_cut_while_open_is_noticed_before_it_is_read(path):
    checkpoint = open_checkpoint(write(path, WHOLE))
    with path.open("r+b") as file:
        file.truncate(len(WHOLE) - 4096)
    with pytest.raises(ModelError, match="changed while"):
        checkpoint.weights.get("model.norm.weight")


def permuted(weight, heads):
    """Permute q and k like llama.cpp's converter: rows of the two half-heads alternate."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("turned", [8, 16])
def test_pairs_that_the_converter_moved_apart_are_joined(turned):
    value = np.arange(3 * 16 * 2).reshape(48, 2)
    by_head = value.reshape(3, 16, 2)
    parts = by_head[:, :turned:2], by_head[:, 1:turned:2], by_head[:, turned:]
    stored = np.concatenate(parts, axis=1).reshape(48, 2)
    assert np.array_equal(stored[pair_row_order(48, 3, turned, "q")], value)


@pytest.mark.parametrize(("rows", "turned"), [(47, 8), (48, 7), (48, 18)])
def test_rows_without_whole_pairs_are_named(rows, turned):
    with pytest.raises(ModelError, match=f"q has {rows} rows, which do not fit 3 heads with"):
        pair_row_order(rows, 3, turned, "q")


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_row_order_undoes_the_permutation_of_llama_only(path, arch):
    from cpuserve.quant import dequantize

    rng = np.random.default_rng(0)
    tensors, hf = [], {}
    for name, dims, kind, data in make.tiny_tensors(rng, bias=True):
        weight = np.frombuffer(data, "<f4").reshape(dims[::-1])
        hf[name] = weight
        heads = {"blk.0.attn_q": 2, "blk.0.attn_k": 1}.get(name.rsplit(".", 1)[0])
        if heads and arch == "llama":
            weight = permuted(weight, heads)
        tensors.append((name, dims, kind, weight.tobytes()))
    write(path, gguf(make.tiny_values(arch), tensors))
    weights = open_checkpoint(path).weights
    for theirs, ours in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
        for kind in ("weight", "bias"):
            tensor = weights.get(f"model.layers.0.self_attn.{ours}.{kind}")
            assert np.array_equal(dequantize(tensor), hf[f"blk.0.{theirs}.{kind}"])
    q_order = weights.get("model.layers.0.self_attn.q_proj.weight").row_order
    assert (q_order is not None) == (arch == "llama")


@pytest.mark.parametrize(("dtype", "number", "size"), [("Q8_0", 8, 68), ("NVFP4", 40, 36)])
def test_a_bias_in_blocks_whose_numbers_have_another_order_is_refused(path, dtype, number, size):
    tensors = make.tiny_tensors(np.random.default_rng(0), bias=True)
    at = [name for name, *_ in tensors].index("blk.0.attn_q.bias")
    tensors[at] = ("blk.0.attn_q.bias", (64,), number, bytes(size))
    weights = open_checkpoint(write(path, gguf(make.tiny_values(), tensors))).weights
    with pytest.raises(ModelError, match=rf"bias has type {dtype}, but must be F32, F16 or BF16$"):
        weights.get("model.layers.0.self_attn.q_proj.bias")
