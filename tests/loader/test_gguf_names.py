"""The choice among the GGUF files of a repository, by the names that publishers give them."""

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.hub import default_gguf, gguf_of, parts_of

NAMES = [
    "README.md",
    "Qwen3-4B-BF16.gguf",
    "Qwen3-4B-Q4_0.gguf",
    "Qwen3-4B-Q4_K_M.gguf",
    "Qwen3-4B-UD-Q4_K_M.gguf",
    "Qwen3-4B-UD-Q5_K_XL.gguf",
    "Qwen3-4B.i1-IQ3_XXS.gguf",
    "Q6_K/Qwen3-4B-00001-of-00002.gguf",
    "Q6_K/Qwen3-4B-00002-of-00002.gguf",
    "f16-00001-of-00001.gguf",
    "mmproj-F32.gguf",
    "qwen3-4b-mxfp4_moe.gguf",
]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("q4_k_m", "Qwen3-4B-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "Qwen3-4B-UD-Q4_K_M.gguf"),
        ("Q5_K_XL", "Qwen3-4B-UD-Q5_K_XL.gguf"),
        ("Q4_0", "Qwen3-4B-Q4_0.gguf"),
        ("bf16", "Qwen3-4B-BF16.gguf"),
        ("F16", "f16-00001-of-00001.gguf"),
        ("IQ3_XXS", "Qwen3-4B.i1-IQ3_XXS.gguf"),
        ("i1-IQ3_XXS", "Qwen3-4B.i1-IQ3_XXS.gguf"),
        ("Q6_K", "Q6_K/Qwen3-4B-00001-of-00002.gguf"),
        ("MXFP4_MOE", "qwen3-4b-mxfp4_moe.gguf"),
        ("Qwen3-4B-Q4_0.gguf", "Qwen3-4B-Q4_0.gguf"),
        ("Qwen3-4B-Q4_0", "Qwen3-4B-Q4_0.gguf"),
        ("Q6_K/Qwen3-4B-00002-of-00002.gguf", "Q6_K/Qwen3-4B-00001-of-00002.gguf"),
    ],
)
def test_a_type_or_a_name_selects_one_file(wanted, name):
    assert gguf_of("org/x", NAMES, wanted) == name


@pytest.mark.parametrize("wanted", ["Q4_K", "Q4", "4_0", "F32", "README.md", "M"])
def test_what_selects_none_lists_the_types_that_there_are(wanted):
    listed = "Q6_K, BF16, Q4_0, Q4_K_M, UD-Q4_K_M, UD-Q5_K_XL, IQ3_XXS, f16, mxfp4_moe"
    with pytest.raises(ModelError, match=f"called or of type '{wanted}'; it has {listed}$"):
        gguf_of("org/x", NAMES, wanted)


def test_a_type_of_two_models_lists_both():
    with pytest.raises(ModelError, match=r"several GGUF files for 'Q8_0'; name one: a-Q8_0\.gguf"):
        gguf_of("org/x", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (NAMES, "Qwen3-4B-Q4_K_M.gguf"),
        (["m-Q8_0.gguf", "m-q4_0.gguf", "a-F16.gguf"], "m-q4_0.gguf"),
        (["m-Q8_0.gguf", "m-Q2_K.gguf"], "m-Q2_K.gguf"),
        (["z/m-Q4_K_M-00002-of-00002.gguf", "a.gguf"], "z/m-Q4_K_M-00001-of-00002.gguf"),
        (["mmproj-a.gguf", "model.safetensors"], None),
    ],
)
def test_the_default_is_q4_k_m_then_q4_0_then_the_first(names, wanted):
    assert default_gguf(names) == wanted


def test_parts_lie_in_the_folder_of_the_first():
    wanted = ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"]
    assert parts_of("a/m-00001-of-00002.gguf") == wanted
    assert parts_of("a/m.gguf") == ["a/m.gguf"]
