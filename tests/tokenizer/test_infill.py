"""Prompts for fill-in-the-middle, in the order that each family of models was trained on."""

from __future__ import annotations

import json

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.infill import InfillTokens, infill_prompt, infill_tokens
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_model


def tokenizer_with(tmp_path, *tokens):
    """The tokenizer of the tiny models, with these added tokens."""
    made = json.loads((tiny_model("llama") / "tokenizer.json").read_text())
    first = 1 + max(made["model"]["vocab"].values())
    for i, token in enumerate(tokens):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": first + i, "content": token, "special": True, **flags}
        made["added_tokens"].append(added)
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    return Tokenizer.load(tmp_path)


def prompt(tokenizer, prefix="a = ", suffix="\nprint(a)"):
    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    found = infill_prompt(tokenizer, infill_tokens(tokenizer), ids(prefix), ids(suffix))
    return tokenizer.decode(found, skip_special_tokens=False)


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        (
            "<\uff5cfim\u2581begin\uff5c>",
            "<\uff5cfim\u2581hole\uff5c>",
            "<\uff5cfim\u2581end\uff5c>",
        ),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_the_prefix_comes_first(tmp_path, names):
    before, between, after = names
    text = prompt(tokenizer_with(tmp_path, *reversed(names)))
    assert text == f"{before}a = {between}\nprint(a){after}"


def test_mistral_reads_the_suffix_first(tmp_path):
    text = prompt(tokenizer_with(tmp_path, "[PREFIX]", "[SUFFIX]"))
    assert text == "[SUFFIX]\nprint(a)[PREFIX]a = "


def test_the_tokens_between_files_are_those_of_the_family(tmp_path):
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<reponame>", "<filename>")
    tokenizer = tokenizer_with(tmp_path, *names)
    found = infill_tokens(tokenizer)
    assert tokenizer.token_text(found.repository) == "<reponame>"
    assert tokenizer.token_text(found.file) == "<filename>"


def test_a_model_without_these_tokens_is_refused():
    tokenizer = Tokenizer.load(tiny_model("llama"))
    assert InfillTokens.of(tokenizer) is None
    with pytest.raises(InvalidRequest, match="no tokens for fill-in-the-middle") as caught:
        infill_tokens(tokenizer, "input_suffix")
    assert caught.value.role == "input_suffix"
