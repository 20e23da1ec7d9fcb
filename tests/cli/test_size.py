"""`cpuserve size MODEL`: memory and highest rates."""

import json

import pytest

from cpuserve.cli.main import main
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama"))


def test_the_figures_follow_from_each_other(capsys, model):
    assert main(["size", model, "--json", "--kv-cache-memory", "16MiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]
    assert found["kv_cache_bytes"] <= 16 << 20
    tokens = found["kv_tokens"] * found["kv_bytes_per_token"]
    assert tokens == pytest.approx(found["kv_cache_bytes"])
    read = found["decode_tokens_per_s"] * found["bytes_per_decoded_token"]
    assert read == pytest.approx(found["read_bytes_per_s"])
    assert 0 < found["bytes_per_decoded_token"] <= 2 * found["weight_bytes"]
    assert found["prompt_tokens_per_s"] > found["decode_tokens_per_s"] / 100


def test_the_text_has_a_line_for_each_subject(capsys, model):
    assert main(["size", model]) == 0
    text = capsys.readouterr().out
    for subject in ("model", "weights", "KV cache", "decode", "prompt"):
        assert f"  {subject} " in text
    assert "tokens/s" in text
    assert all(len(row) <= 80 for row in text.splitlines() if model not in row)


def test_a_model_that_is_missing_is_one_line(capsys, tmp_path):
    assert main(["size", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
