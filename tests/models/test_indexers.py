"""Families with indexers: they read the same keys as in transformers, far beyond what they keep."""

from __future__ import annotations

import pytest

from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.operations.indexer import SelectKeys
from tests.helpers.depth import deep_but
from tests.helpers.oracle import first_state, interpreter_of, tensors_of, transformers_logits
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_config, tiny_model
from tests.models.test_families import logits_of

TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(170)]
ALL = {"index_topk": 512, "indexer_budget": 512}  # every key of every request
BLOCKS = (5, 2, 9, 1, 3, 7)
VARIANTS = {
    "deepseek-v3.2": ("deepseek-v3.2", {"index_topk": 24}),
    "deepseek-v3.2-yarn": (
        "deepseek-v3.2",
        {
            "index_topk": 33,
            "index_n_heads": 11,
            "index_head_dim": 48,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.9,
            },
        },
    ),
    "deepseek-v4": ("deepseek-v4", {"index_topk": 12}),
    "deepseek-v4-pools-of-8": (
        "deepseek-v4",
        {
            "index_topk": 7,
            "index_n_heads": 11,
            "index_head_dim": 48,
            "compress_rates": {
                "compressed_sparse_attention": 8,
                "heavily_compressed_attention": 64,
            },
            "rope_scaling": None,
        },
    ),
    "axk2": ("axk2", {"index_topk": 24}),
    "hy-v4": ("hy-v4", {"index_topk": 24, "rms_norm_eps": 1e-3}),
    "hy-v4-types": ("hy-v4", {"index_topk": 33, "index_head_dim": 48, "indexer_types": None}),
    "glm-moe-dsa": ("glm-moe-dsa", {"index_topk": 24}),
    "glm-moe-dsa-all-full": ("glm-moe-dsa", {"index_topk": 24, "indexer_types": None}),
    "glm5-next": ("glm5-next", {"index_topk": 24}),
    "qwen4-exp": ("qwen4-exp", {"indexer_budget": 24}),
    "qwen4-exp-blocks-of-4": (
        "qwen4-exp",
        {"indexer_budget": 20, "indexer_compress_ratio": 4, "rms_norm_eps": 1e-3},
    ),
    "glm5-next-pools-of-16": ("glm5-next", {"index_topk": 48, "index_kpool": 16}),
    "glm5-next-pools-of-1": ("glm5-next", {"index_topk": 24, "index_kpool": 1}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_far_longer_than_the_selection_agrees_with_transformers(variant):
    family, changes = VARIANTS[variant]
    path = tiny_model(family, **changes)
    expected = transformers_logits(path, TOKENS)
    got = logits_of(interpreter_of(path), TOKENS, (1, 21, 1, 60), BLOCKS)
    assert (got - expected).abs().max() < 1e-3 * (expected.max() - expected.min())


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_selection_matters(variant):
    """With all keys, the logits of late tokens are others, and those of early tokens the same."""
    family, changes = VARIANTS[variant]
    path = tiny_model(family, **changes)
    interpreter = interpreter_of(path)
    most = min(op.reads_at_most for op in interpreter.program.ops if isinstance(op, SelectKeys))
    got = logits_of(interpreter, TOKENS, blocks=BLOCKS)
    dense = build_program(spec_from_config(tiny_config(family, **{**changes, **ALL})))
    assert not any(isinstance(op, SelectKeys) for op in dense.ops)
    states = 64 if dense.states else 0
    whole = logits_of(
        Interpreter(dense, tensors_of(path), num_states=states), TOKENS, blocks=BLOCKS
    )
    span = whole.max() - whole.min()
    assert (got - whole)[:most].abs().max() < 1e-5 * span
    assert (got - whole)[most + 20 :].abs().amax(dim=1).min() > 1e-3 * span


@pytest.mark.parametrize("variant", deep_but([*VARIANTS][::4], VARIANTS))
def test_greedy_tokens_agree_with_transformers(variant):
    family, changes = VARIANTS[variant]
    path, tokens = tiny_model(family, **changes), TOKENS[:100]
    interpreter = interpreter_of(path)
    sequence = Sequence(0, list(tokens), list(BLOCKS), first_state(interpreter))
    for _ in range(32):
        logits = interpreter.run(step(sequence.chunk()))
        sequence.tokens.append(int(logits[-1].argmax()))
    # A token does not depend on later ones, so one pass over all of them has the logits of each.
    logits = transformers_logits(path, sequence.tokens[:-1])
    assert sequence.tokens[100:] == logits[99:].argmax(-1).tolist()
