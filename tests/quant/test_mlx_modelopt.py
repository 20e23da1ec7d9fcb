"""MLX directories, modelopt and AutoRound, packed by the formats' definitions, and refusals."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import check_weights, open_checkpoint, quant_method, read_config
from cpuserve.loader.safetensors import SafetensorsStore
from cpuserve.models import build_program, spec_from_config, stored_names
from cpuserve.quant import dequantize, open_weights
from tests.helpers.quantized import mlx, quantized_copy
from tests.helpers.tiny import tiny_model
from tests.quant.checkpoints import NORM, STREAM, Fp8, K, N, Store, check, opened, pack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def mlx_store(bits, group, codes=None, **more):
    """(values, store) of random codes with a scale and a bias for each group."""
    codes = STREAM.integers(0, 1 << bits, (N, K), np.uint8) if codes is None else codes
    scales, biases = STREAM.uniform(0.01, 0.02, (2, N, K // group)).astype(np.float16)
    biases = -biases * 8
    spread = [np.repeat(x.astype(np.float32), group, axis=1) for x in (scales, biases)]
    parts = {"weight": pack(codes, bits=bits).view(np.uint32), "scales": scales, "biases": biases}
    parts |= more
    store = Store(norm__weight=NORM, **{f"q__{name}": part for name, part in parts.items()})
    return codes * spread[0] + spread[1], store


def mlx_opened(store, **settings):
    return open_weights("mlx", store, {"quantization": settings})


@pytest.mark.parametrize(("group", "kind"), [(32, "w4m_g32"), (64, "w4m_g32"), (128, "w4m_g128")])
def test_mlx_keeps_codes_of_four_bits(group, kind):
    values, store = mlx_store(4, group)
    check(mlx_opened(store, bits=4, group_size=group), values, kind, 0)


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8])
def test_mlx_converts_codes_of_other_bits(bits):
    values, store = mlx_store(bits, 64)
    weights = mlx_opened(store, bits=bits, group_size=64)
    check(weights, values, "w8_g32", 1e-6, packed=1)


def test_mlx_reads_the_settings_of_single_matrices():
    values, store = mlx_store(8, 32)
    weights = mlx_opened(store, bits=4, group_size=64, q={"bits": 8, "group_size": 32})
    check(weights, values, "w8_g32", 1e-6, packed=1)


@pytest.mark.parametrize(
    "usual",
    [
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 8, "group_size": 32, "mode": "mxfp8"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    ],
)
def test_mlx_settings_of_a_matrix_without_a_mode_mean_affine_codes(usual):
    """Blaizzy/mlx-vlm#1703, waybarrios/vllm-mlx#783: experts in MXFP4 beside attention in Q8."""
    values, store = mlx_store(8, 64)
    weights = mlx_opened(store, **usual, q={"bits": 8, "group_size": 64})
    check(weights, values, "w8_g32", 1e-6, packed=1)
    values, store = mlx_store(4, 64)
    check(mlx_opened(store, **usual, q={}), values, "w4m_g32", 0)


def test_mlx_reads_mxfp8():
    codes = Fp8(STREAM.uniform(-3, 3, (N, K)))
    exponents = STREAM.integers(110, 130, (N, K // 32), np.uint8)
    store = Store(norm__weight=NORM, q__weight=codes.bytes.view(np.uint32), q__scales=exponents)
    values = codes.values * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=1)
    check(mlx_opened(store, bits=8, group_size=32, mode="mxfp8"), values, "w8_g32", 1e-6, packed=1)


def test_mlx_reads_mxfp4_and_nvfp4():
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    exponents = STREAM.integers(110, 130, (N, K // 32), np.uint8)
    words = pack(codes).view(np.uint32)
    store = Store(norm__weight=NORM, q__weight=words, q__scales=exponents)
    values = E2M1[codes] * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=1)
    check(mlx_opened(store, bits=4, group_size=32, mode="mxfp4"), values, "mxfp4", 0)
    small = Fp8(STREAM.uniform(0.5, 3, (N, K // 16)))
    store = Store(norm__weight=NORM, q__weight=words, q__scales=small.bytes)
    values = E2M1[codes] * np.repeat(small.values, 16, axis=1)
    check(mlx_opened(store, bits=4, group_size=16, mode="nvfp4"), values, "nvfp4", 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_reads_each_expert_of_a_stack(bits):
    experts = [mlx_store(bits, 64) for _ in range(3)]
    parts = {
        part: np.stack([store.tensors[f"q.{part}"] for _, store in experts])
        for part in ("weight", "scales", "biases")
    }
    at = "mlp.switch_mlp.up_proj"
    store = Store(norm__weight=NORM, **{f"{at}.{part}": value for part, value in parts.items()})
    settings = {"mlp.switch_mlp.up_proj": {"bits": bits, "group_size": 64}}
    weights = mlx_opened(store, bits=2, group_size=32, **settings)
    assert weights.names() == {
        "norm.weight",
        *(f"mlp.experts.{e}.up_proj.weight" for e in range(3)),
    }
    for e, (values, _) in enumerate(experts):
        found = dequantize(weights.get(f"mlp.experts.{e}.up_proj.weight"))
        np.testing.assert_allclose(found, values, atol=1e-6)


def test_mlx_subtracts_the_one_that_it_has_added_to_norms():
    taps = STREAM.normal(size=(6, 4, 1)).astype(np.float32)
    norms = dict.fromkeys(("model.norm.weight", "linear_attn.norm.weight"), NORM)
    store = Store(**norms, **{"linear_attn.conv1d.weight": taps})
    plain = mlx_opened(store)
    np.testing.assert_array_equal(dequantize(plain.get("model.norm.weight"))[0], NORM)
    store.offset_norms = True
    weights = mlx_opened(store)
    np.testing.assert_allclose(dequantize(weights.get("model.norm.weight"))[0], NORM - 1)
    np.testing.assert_array_equal(dequantize(weights.get("linear_attn.norm.weight"))[0], NORM)
    found = dequantize(weights.get("linear_attn.conv1d.weight"))
    np.testing.assert_array_equal(found, taps.reshape(6, 1, 4))


@pytest.mark.parametrize(
    ("architecture", "text", "offset"),
    [
        ("Qwen3NextForCausalLM", None, True),
        ("Qwen3_5MoeForCausalLM", None, True),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5_text", True),
        ("MiniCPMV4_6ForConditionalGeneration", "qwen3_5_text", True),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", False),
        ("LlamaForCausalLM", None, False),
    ],
)
def test_families_say_whether_mlx_adds_one_to_their_norms(architecture, text, offset, tmp_path):
    whole = {} if text is None else {"text_config": {"model_type": text}}
    names = stored_names({"architectures": [architecture], **whole})
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert SafetensorsStore(tmp_path, names=names).offset_norms is offset


def test_norms_beside_plain_convolutions_are_plain_in_mlx():
    """ml-explore/mlx-lm#1197: a wrong sign of the format shifted each norm by 1."""
    taps = STREAM.uniform(-1, 1, (6, 1, 4)).astype(np.float16)
    store = Store(**{"model.norm.weight": NORM, "linear_attn.conv1d.weight": taps})
    store.offset_norms = True
    weights = mlx_opened(store)
    np.testing.assert_array_equal(dequantize(weights.get("model.norm.weight"))[0], NORM)
    np.testing.assert_array_equal(dequantize(weights.get("linear_attn.conv1d.weight")), taps)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"bits": 7, "group_size": 64}, {}, "with 7 bits in groups of 64 is not supported"),
        ({"bits": 4, "group_size": 48}, {}, "in groups of 48 is not supported"),
        ({"bits": 6, "group_size": 32, "mode": "mxfp6"}, {}, "of mode mxfp6"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp8"}, {}, "of mode mxfp8 with 4 bits"),
        ({"bits": 4, "group_size": 32}, {}, "does not fit its scales"),
        ({"bits": 4, "group_size": 64}, {"biases": np.zeros((N, 1), np.float16)}, "or its biases"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, {"scales": NORM}, "does not fit its"),
    ],
)
def test_mlx_matrices_that_do_not_fit_are_refused(settings, more, message):
    with pytest.raises(ModelError, match=message):
        mlx_opened(mlx_store(4, 64, **more)[1], **settings).get("q.weight")


@pytest.mark.parametrize("linear", ["bitlinear", "autobitlinear"])
def test_bitnet_unpacks_ternary_codes_as_transformers_does(linear):
    from transformers.integrations.bitnet import pack_weights

    ternary = torch.from_numpy(STREAM.integers(-1, 2, (N, K), np.int8))
    with torch.compiler.set_stance("force_eager"):
        packed = pack_weights(ternary.clone()).numpy()
    scale = 0.5 if linear == "autobitlinear" else 2.0
    parts = {"q.weight": packed, "q.weight_scale": np.full(1, scale, np.float32)}
    weights = opened("bitnet", Store(norm__weight=NORM, **parts), linear_class=linear)
    check(weights, ternary.float().numpy() * 0.5, "w2z_g256", 0)


def test_bitnet_rounds_dense_matrices_when_it_says_online():
    from transformers.integrations.bitnet import WeightQuant

    weight = STREAM.normal(size=(N, K)).astype(np.float32)
    store = Store(
        norm__weight=NORM,
        **{"q_proj.weight": weight, "a.q_proj.weight": weight, "b.weight": weight},
    )
    weights = opened(
        "bitnet", store, quantization_mode="online", modules_to_not_convert=["a.q_proj"]
    )
    with torch.compiler.set_stance("force_eager"):
        want = WeightQuant.forward(None, torch.from_numpy(weight)).numpy()
    got = dequantize(weights.get("q_proj.weight"))
    np.testing.assert_allclose(got, want, rtol=1e-3)
    assert weights.kind("q_proj.weight", "bfloat16").startswith("w2")
    for name in ("a.q_proj.weight", "b.weight"):
        np.testing.assert_array_equal(dequantize(weights.get(name)), weight)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"use_rms_norm": True}, {}, "use_rms_norm = True is not supported"),
        ({"linear_class": "other"}, {}, "linear_class = other is not supported"),
        ({"quantization_mode": "late"}, {}, "quantization_mode = late is not supported"),
        ({}, {"q.weight_scale": np.zeros(1, np.float32)}, "one number other than 0"),
        ({}, {"q.weight_scale": np.ones(N, np.float32)}, "one number other than 0"),
        ({}, {"q.weight": np.zeros((N // 4, 40), np.uint8)}, "need a multiple of 32"),
    ],
)
def test_bitnet_matrices_that_do_not_fit_are_refused(settings, more, message):
    packed = np.zeros((N // 4, K), np.uint8)
    parts = {"q.weight": packed, "q.weight_scale": np.ones(1, np.float32), **more}

    def read():
        weights = opened("bitnet", Store(norm__weight=NORM, **parts), **settings)
        weights.get("q.weight").cut(slice(0, N), 0)

    with pytest.raises(ModelError, match=message):
        read()


def test_modelopt_keeps_fp8_and_nvfp4():
    weight = Fp8(STREAM.uniform(-300, 300, (N, K)))
    scale = np.float32(0.01)
    more = {"q__weight_scale": np.full((), scale), "q__input_scale": np.ones((), np.float32)}
    store = Store(norm__weight=NORM, q__weight=weight, q__k_scale=np.ones(1, np.float32), **more)
    weights = opened("modelopt", store, quant_algo="FP8")
    check(weights, weight.values * scale, "e4m3_g128", 0)
    codes, small = (
        STREAM.integers(0, 16, (N, K), np.uint8),
        Fp8(STREAM.uniform(0.5, 3, (N, K // 16))),
    )
    parts = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": small,
        "weight_scale_2": np.full((), scale),
    }
    store = Store(norm__weight=NORM, **{f"q__{name}": part for name, part in parts.items()})
    values = E2M1[codes] * np.repeat(small.values * scale, 16, axis=1)
    check(opened("modelopt", store, quant_algo="NVFP4"), values, "nvfp4", 1e-6)
    factors = STREAM.uniform(0.5, 2, K).astype(np.float32)
    more = {f"q__{name}": part for name, part in {**parts, "pre_quant_scale": factors}.items()}
    scaled = opened("modelopt", Store(norm__weight=NORM, **more), quant_algo="NVFP4_AWQ")
    check(scaled, values * factors, "w8_g32", 1e-6, packed=1)
    parts["weight_scale"] = small.bytes
    store = Store(**{f"q__{name}": part for name, part in parts.items()})
    with pytest.raises(ModelError, match="does not fit its weight_scale"):
        opened("modelopt", store).get("q.weight")


def modelopt_codes(bits, groups):
    """(parts, values) of a matrix of integers, in modelopt's layout."""
    most = 1 << (bits - 1)
    codes = STREAM.integers(-most, most, (N, K)).astype(np.int8)
    scale = STREAM.uniform(0.01, 0.02, (N, groups)).astype(np.float32)
    packed = codes
    if bits == 4:
        nibbles = codes.view(np.uint8) & 15
        packed = nibbles[::2] | nibbles[1::2] << 4
    values = codes * np.repeat(scale, K // groups, axis=1)
    return {"weight": packed, "weight_scale": scale}, values


@pytest.mark.parametrize(
    ("group", "kind", "packed"), [(128, "w4m_g128", None), (32, "w4_g32", None), (16, "w8_g32", 1)]
)
def test_modelopt_keeps_int4_whose_rows_share_bytes(group, kind, packed):
    parts, values = modelopt_codes(4, K // group)
    factors = STREAM.uniform(0.5, 2, K).astype(np.float32)
    stores = [
        Store(norm__weight=NORM, **{f"q__{name}": part for name, part in each.items()})
        for each in (parts, {**parts, "pre_quant_scale": factors})
    ]
    check(opened("modelopt", stores[0], quant_algo="W4A16_AWQ"), values, kind, 1e-4, packed)
    scaled = opened("modelopt", stores[1], quant_algo="W4A16_AWQ")
    check(scaled, values * factors, "w8_g32", 1e-6, packed=1)


def test_modelopt_keeps_int8_with_a_scale_for_each_row():
    parts, values = modelopt_codes(8, 1)
    parts["weight_scale"] = parts["weight_scale"][:, 0]
    store = Store(norm__weight=NORM, **{f"q__{name}": part for name, part in parts.items()})
    check(opened("modelopt", store, quant_algo="W8A16"), values, "w8_channel", 0)
    factors = STREAM.uniform(0.5, 2, K).astype(np.float32)
    store.tensors["q.pre_quant_scale"] = factors
    scaled = opened("modelopt", store, quant_algo="W8A8_SQ_PER_CHANNEL")
    check(scaled, values * factors, "w8_g32", 1e-5, packed=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"weight_scale": np.ones((N, 3), np.float32)}, "does not fit its weight_scale"),
        ({"weight_scale": np.ones((N // 2, 2), np.float32)}, "does not fit its weight_scale"),
        ({"weight_scale_2": np.ones((), np.float32)}, "and weight_scale_2"),
        ({"pre_quant_scale": np.ones(3, np.float32)}, "has 3 numbers for 256 inputs"),
        ({"weight": np.zeros((N, K), np.int8)}, "of int8 has 2 groups of scales"),
        ({"weight_scale": np.zeros((N, K // 32), np.uint8)}, "does not fit its weight_scale"),
        (
            {
                "weight_scale": np.zeros((N // 2, K // 16), np.uint8),
                "pre_quant_scale": np.ones(2 * K, np.float32),
            },
            "or pre_quant_scale",
        ),
        (
            {
                "weight": Fp8(np.ones((N, K))),
                "weight_scale": np.ones((2, 1, 2, 1), np.float32),
            },
            "its scales are .2, 2.; they must be one number, one for each row",
        ),
        (
            {"weight": Fp8(np.ones((N, K))), "pre_quant_scale": np.ones(K, np.float32)},
            "of an FP8 matrix is not supported",
        ),
    ],
)
def test_modelopt_matrices_that_do_not_fit_are_refused(more, message):
    parts = {**modelopt_codes(4, 2)[0], **more}
    store = Store(norm__weight=NORM, **{f"q__{name}": part for name, part in parts.items()})
    with pytest.raises(ModelError, match=message):
        dequantize(opened("modelopt", store, quant_algo="W4A16_AWQ").get("q.weight"))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4_SVD"}, "quant_algo NVFP4_SVD is not supported"),
        ("auto-round", {"bits": 5}, "bits = 5 is not supported"),
        ("auto-round", {"data_type": "mx_fp"}, "data_type = mx_fp is not supported"),
        ("auto-round", {"packing_format": "auto_round:llm"}, "auto_round:llm is not supported"),
        ("auto-round", {"extra_config": {"a": {"bits": 5}}}, "bits in a = 5 is not supported"),
        (
            "auto-round",
            {"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}},
            "bits = .4, 8. is not supported",
        ),
        ("auto-round", {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits = 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = marlin is not supported"),
        ("gptq", {"format": "bitblas", "checkpoint_format": "gptq"}, "format = bitblas is not"),
        (
            "gptq",
            {"dynamic": {"+:.*up.*": {"bits": 5}}},
            "5 is not supported, only .* 2, 3, 4 or 8",
        ),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format = True is not supported"),
    ],
)
def test_other_layouts_are_refused_by_their_settings(method, settings, message):
    with pytest.raises(ModelError, match=message):
        opened(method, Store(norm__weight=NORM), **settings)


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, "dense"),
        ({"quantization": None, "quantization_config": {}}, "dense"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, "mlx"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}, "gptq"),
        ({"quantization_config": {"quant_type": "int4wo"}}, "None"),
        ({"quantization": "something"}, "something"),
        ({"compression_config": {"quant_method": "sparseml"}}, "sparseml"),
    ],
)
def test_a_config_says_how_its_weights_are_quantized(config, method):
    assert quant_method(config) == method
    if method in ("None", "something", "sparseml"):
        with pytest.raises(ModelError, match="is not supported; supported: "):
            open_weights(method, Store(norm__weight=NORM), config)


def test_older_directories_of_modelopt_have_a_file_of_their_own(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    about = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    config = read_config(tmp_path)
    assert quant_method(config) == "modelopt"
    assert config["quantization_config"]["quant_algo"] == "NVFP4"


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config"])
@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_settings_of_the_text_part_are_those_of_its_weights(tmp_path, part, key):
    """The tower of a model of pictures is often plain, so the settings are beside the text's."""
    settings = {"quant_method": "bitnet", "quantization_mode": "online"}
    config = {"architectures": ["LlamaForCausalLM"], part: {key: settings}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert quant_method(found) == "bitnet"
    assert found[key] == settings
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quant_method(read_config(tmp_path)) == "gptq"


@pytest.mark.parametrize(
    "method", ["quanto", "aqlm", "vptq", "spqr", "higgs", "eetq", "fp_quant", "sinq", "metal"]
)
@pytest.mark.parametrize("part", [None, "text_config"])
def test_formats_that_are_not_read_are_refused_by_name(tmp_path, method, part):
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": method}}
    config |= {part: settings} if part else settings
    shutil.copytree(tiny_model("llama"), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"quantization '{method}' is not supported; supported"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("name", ["quark int8", "torchao int8", "hqq", "modelopt int4", "awq"])
def test_stored_parts_are_not_taken_for_plain_weights(tmp_path, name):
    """The settings are removed, or of another format."""
    path = quantized_copy(tiny_model("llama", intermediate_size=192), name, tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    for settings in (None, {"quant_method": "fp8"}, {"quant_method": "bitnet"}):
        (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(ModelError):
            load(path)


def load(path):
    checkpoint = open_checkpoint(path)
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)


def test_the_first_name_of_compressed_tensors_settings_is_read(tmp_path):
    path = quantized_copy(tiny_model("llama", intermediate_size=192), "mxfp4", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    load(path)
    kind = open_checkpoint(path).weights.kind("model.layers.0.mlp.up_proj.weight", "bfloat16")
    assert kind == "mxfp4"


def test_matrices_that_a_quantizer_left_alone_are_plain(tmp_path):
    """Exceptions are seen in the tensors, whatever the settings call them."""
    source = tiny_model("llama", intermediate_size=192)
    path = quantized_copy(source, "quark int8", tmp_path / "m")
    tensors, plain = load_file(path / "model.safetensors"), load_file(source / "model.safetensors")
    at = "model.layers.1.mlp.down_proj.weight"
    left = {name: value for name, value in tensors.items() if not name.startswith(at)}
    save_file({**left, at: plain[at]}, path / "model.safetensors")
    weights = open_checkpoint(path).weights
    assert weights.kind(at, "bfloat16") == "dense_bf16"
    assert weights.kind(at.replace("down", "up"), "bfloat16") == "w8_channel"
    np.testing.assert_array_equal(dequantize(weights.get(at)), plain[at].float().numpy())


@pytest.mark.parametrize("at", ["model.", "language_model.model.", "model.language_model."])
@pytest.mark.parametrize("keyed", ["model.", "language_model.model.", "model.language_model."])
def test_mlx_settings_of_a_matrix_are_found_however_the_text_part_is_called(tmp_path, at, keyed):
    """Epistates/pmetal#26, Blaizzy/mlx-vlm#1079: matrices of 8 bits were read as of 4."""
    source = tiny_model("llama")
    shutil.copytree(source, tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    name = "layers.0.self_attn.q_proj"
    parts = mlx(tensors.pop(f"model.{name}.weight").float(), 8, 64)
    tensors = {key.replace("model.", at, 1): value for key, value in tensors.items()}
    tensors |= {f"{at}{name}.{part}": value for part, value in parts.items()}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    own = {f"{keyed}{name}": {"bits": 8, "group_size": 64}}
    config["quantization"] = {"bits": 4, "group_size": 64, "mode": "affine", **own}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path / "m")
    check_weights(build_program(spec_from_config(checkpoint.config)), checkpoint.weights)
    got = dequantize(checkpoint.weights.get(f"model.{name}.weight"))
    want = load_file(source / "model.safetensors")[f"model.{name}.weight"].float().numpy()
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()
