"""The barriers of a step: threads wait only where one needs what another has written."""

from __future__ import annotations

import pytest

from cpuserve import _C
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.lower import Lowering
from cpuserve.runtime.native import fill_vectors, pack_matrices
from cpuserve.runtime.pack import pack
from tests.helpers.depth import deep_but
from tests.helpers.levels import LEVELS
from tests.helpers.tiny import SAMPLE, tiny_config, tiny_model

# Barriers of the last layer: in a step of one token, and in one of several. In the first, the last
# thread at a barrier does what has one row, so what remains are the operations that threads share:
# qkv, attention, o, the router, and the two products of the MLP or of the experts.
LAYERS = {
    "llama": (5, 8),
    "qwen2": (5, 8),
    "qwen3": (5, 8),
    "gemma3": (5, 8),
    "olmo2": (5, 8),
    "falcon-40b": (5, 7),
    "qwen3-moe": (6, 11),
    "mixtral": (6, 11),
    "gpt-oss": (6, 11),
    "olmoe": (6, 11),
    "gemma4-moe": (8, 14),
    "glm4-moe": (8, 13),
    "deepseek-v2": (11, 16),
    "glm4-moe-lite": (12, 18),
    "granite4-hybrid": (9, 14),
    "qwen3-next": (10, 15),
    "lfm2-moe": (7, 13),
}
BLOCKS = 8


def barriers(family, tokens, **overrides):
    """The barriers of a step with `tokens` tokens of one sequence."""
    checkpoint = open_checkpoint(tiny_model(family, **overrides))
    program = build_program(spec_from_config(checkpoint.config))
    found = []

    def main():
        lowered = Lowering(
            program,
            lambda _: "dense_bf16",
            isa=LEVELS[0],
            max_tokens=64,
            max_seqs=1,
            max_position=64,
            kv_type="bf16",
        ).run()
        executor = _C.Executor(team, lowered.native, BLOCKS, "bf16", 1, num_states=BLOCKS)
        pack_matrices(executor, lowered, checkpoint.weights, None)
        fill_vectors(executor, lowered, checkpoint.weights)
        ids = list(range(5, 5 + tokens))
        chunk = SeqChunk(0, ids, 0, [BlockTable([0, 1])], [LogitRow(0, target=1)])
        if program.states:
            chunk.tables.append(BlockTable([BLOCKS, BLOCKS + 1]))
        before = executor.progress[0]
        executor.step(pack(StepBatch([chunk])).words)
        found.append(executor.progress[0] - before)

    team = _C.Team(2)
    team.run(main)
    return found[0]


def one_more_layer(family):
    """The parts of a config that add a layer like the last one."""
    config = tiny_config(family)
    deeper = {"num_hidden_layers": config["num_hidden_layers"] + 1}
    for key in ("layer_types", "layers_block_type"):
        if key in config:
            deeper[key] = [*config[key], config[key][-1]]
    return deeper


@pytest.mark.parametrize("family", deep_but(SAMPLE, LAYERS))
def test_barriers_of_a_layer(family):
    """What one more layer adds."""
    deeper = one_more_layer(family)
    found = [barriers(family, tokens, **deeper) - barriers(family, tokens) for tokens in (1, 40)]
    assert tuple(found) == LAYERS[family]


@pytest.mark.parametrize("family", LAYERS)
def test_the_program_counts_the_barriers_of_a_step_of_one_token(family):
    """The count from which the layout on several sockets is chosen, for one more layer."""

    def count(**overrides):
        config = open_checkpoint(tiny_model(family, **overrides)).config
        return build_program(spec_from_config(config)).barriers

    assert count(**one_more_layer(family)) - count() == LAYERS[family][0]
