"""Assistants of Gemma 4: compared with transformers, and refused for other models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from cpuserve import _C
from cpuserve.base.errors import ModelError
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.engine.speculation.assistant import follow
from cpuserve.loader.load import open_checkpoint
from cpuserve.loader.speculation.assistants import open_assistant
from cpuserve.models import build_program, spec_from_config
from cpuserve.runtime.pack import pack
from tests.helpers.assistant import assistant
from tests.helpers.oracle import transformers_of
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model
from tests.models.test_guess_heads import made

TOKENS = [(i * 37 + i * i * 5) % 384 for i in range(70)]
BLOCKS = [5, 2, 7]
WINDOW = 20  # of the tiny models
FORMS = {
    "plain": {},
    "ordered": {"use_ordered_embeddings": True, "num_centroids": 16},
    "global": {"text": {"layer_types": ["full_attention"] * 3}},
    "biased": {"text": {"attention_bias": True}},
}


def shuffled(tensors):
    """Give each centroid tokens that do not follow one another."""
    if "masked_embedding.token_ordering" in tensors:
        order = torch.randperm(512, generator=torch.Generator().manual_seed(1))
        tensors["masked_embedding.token_ordering"] = order


def published(path, model, length):
    """The logits of two guesses after `length` tokens: a row of -inf has no logits.

    transformers lets the window of an assistant see two keys more than the layers of its model do.
    """
    import transformers

    kind = json.loads((path / "config.json").read_text())["architectures"][0]
    config = transformers.AutoConfig.from_pretrained(path)
    config.text_config.sliding_window = WINDOW - 2
    own = (
        getattr(transformers, kind)
        .from_pretrained(path, config=config, attn_implementation="eager")
        .eval()
    )
    if own.masked_embedding is not None:
        own.masked_embedding.centroid_intermediate_top_k = 4
    target, found = transformers_of(model), []
    with torch.inference_mode():
        ids = torch.tensor([TOKENS[: length - 1]])
        out = target.model(ids, return_shared_kv_states=True, use_cache=False)
        hidden, token = out.last_hidden_state[:, -1:], TOKENS[length - 1]
        for _ in range(2):
            embedding = target.model.embed_tokens(torch.tensor([[token]]))
            result = own(
                inputs_embeds=torch.cat([embedding, hidden], dim=-1),
                position_ids=torch.tensor([[length - 1]]),
                shared_kv_states=out.shared_kv_states,
            )
            hidden, logits = result.last_hidden_state, result.logits[0, 0]
            if own.masked_embedding is not None:
                logits[logits == logits.min()] = -torch.inf
            found.append(logits.numpy())
            token = int(logits.argmax())
    return found


def guess(native, found, token, hidden, length):
    """The logits and the hidden state of a guess after `length` tokens; the last one is `token`."""
    tables = [BlockTable(BLOCKS[: -(-(length - 1) // 32)]) for _ in found.caches]
    rows, angles = [LogitRow(0, target=1)], [[length - 1]]
    chunk = SeqChunk(0, [token], length - 2, tables, rows, media=[0], angles=angles)
    native.write_media(0, hidden)
    logits = native.step_logits(pack(StepBatch([chunk])).words)
    return logits[0], native.read_hidden(np.zeros(1, np.int32))


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gemma4", "gemma4-moe", "gemma4-unified"])
@pytest.mark.parametrize("length", [2, 15, 70])
def test_an_assistant_computes_what_transformers_does(tmp_path, family, form, length):
    model = tiny_model(family)
    path = assistant(tmp_path / "a", model, change=shuffled, **FORMS[form])
    want = published(path, model, length)
    checkpoint, (found, weights) = open_checkpoint(model), open_assistant(path, model)
    team, got = _C.Team(2), []

    def main():
        program = build_program(spec_from_config(checkpoint.config))
        target = made(team, program, checkpoint.weights)
        kv = {"kv_owner": target, "kv_layers": list(found.caches)}
        native = made(team, found.program, weights, **kv)
        sequence = Sequence(0, TOKENS, BLOCKS)
        # A draft token that was rejected leaves its keys behind.
        target.step_logits(step(sequence.chunk(min(length + 1, 70), [])).words)
        hidden = target.read_hidden(np.array([length - 2], np.int32))
        first, own = guess(native, found, TOKENS[length - 1], hidden, length)
        second, _ = guess(native, found, int(want[0].argmax()), own, length)
        got.extend([first, second])

    team.run(main)
    for ours, theirs in zip(got, want, strict=True):
        known = np.isfinite(theirs)
        assert known.sum() == (128 if form == "ordered" else 512)
        assert np.abs(ours - theirs)[known].max() <= 1e-3 * np.abs(theirs[known]).max()
        assert ours[known].argmax() == theirs[known].argmax()


def without(name):
    def change(tensors):
        del tensors[name]

    return change


REFUSED = {
    "vocabulary": ({"text": {"vocab_size": 500}}, "made for 500 tokens, and the model has 512"),
    "width": ({"backbone_hidden_size": 96}, "made for 96 columns, and the model has 64"),
    "keys": ({"text": {"head_dim": 32}}, r"made for \[\(2, 32\), .* heads of keys"),
    "tensor": (
        {"change": without("model.layers.1.self_attn.q_proj.weight")},
        r"missing \(1\): model.layers.1.self_attn.q_proj.weight",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_assistant_that_does_not_fit_is_refused_with_the_reason(tmp_path, name):
    options, why = REFUSED[name]
    path = assistant(tmp_path / "a", tiny_model("gemma4"), **options)
    with pytest.raises(ModelError, match=why) as caught:
        open_assistant(path, tiny_model("gemma4"))
    assert "\n" not in str(caught.value)


def test_other_checkpoints_and_other_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match="it is no assistant of Gemma 4"):
        open_assistant(tiny_model("llama"), tiny_model("gemma4"))
    path = assistant(tmp_path / "a", tiny_model("gemma4"))
    with pytest.raises(ModelError, match="the model is LlamaForCausalLM, not Gemma 4"):
        open_assistant(path, tiny_model("llama"))


def test_shared_layers_that_do_not_exist_or_differ_are_refused(tmp_path):
    model = tiny_model("gemma4")
    checkpoint = open_checkpoint(model)
    found, weights = open_assistant(assistant(tmp_path / "a", model), model)
    program = build_program(spec_from_config(checkpoint.config))
    team, reasons = _C.Team(1), []

    def shared(target, program, weights, layers):
        try:
            made(team, program, weights, kv_owner=target, kv_layers=layers)
        except ValueError as error:
            reasons.append(str(error))

    def main():
        target = made(team, program, checkpoint.weights)
        for layers in ([2, 3], [1, 2], [2]):
            shared(target, found.program, weights, layers)
        shared(target, program, checkpoint.weights, list(range(len(program.cache))))

    team.run(main)
    expected = [
        "there is no KV layer 3; there are 3",
        "KV layer 1 has 2 heads of 32, and the program needs 2 of 16",
        "1 shared KV layers for 2 of the program",
        "shared KV layers are read only",
    ]
    assert len(reasons) == len(expected)
    assert all(part in reason for part, reason in zip(expected, reasons, strict=True))


def test_a_block_table_follows_another_one_and_sends_what_changed():
    table, known = BlockTable([1, 2, 3]), BlockTable()
    follow(known, table)
    assert (known, known.sent) == ([1, 2, 3], 0)
    known.sent = 3
    table.append(4)
    follow(known, table)
    assert (known, known.sent) == ([1, 2, 3, 4], 3)
    known.sent = 4
    table.put(1, 9)
    follow(known, table)
    assert (known, known.sent) == ([1, 9, 3, 4], 1)
    known.sent = 4
    table.cut(2)
    follow(known, table)
    assert (known, known.sent) == ([1, 9], 2)


def test_the_config_of_an_assistant_is_as_published(tmp_path):
    path = assistant(tmp_path / "a", tiny_model("gemma4"))
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Gemma4AssistantForCausalLM"]
    found, _ = open_assistant(path, tiny_model("gemma4"))
    # Of five layers the last two read the keys of earlier ones: 1 is global, 2 has a window.
    assert found.caches == (2, 1)
