"""The limits that a native executor reports follow from its weights and from the probes."""

import msgspec
import pytest

from cpuserve.core.cost import ROW_COUNTS, ROW_ROUNDS
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.platforms.limits import REQUESTS, RateLimit
from cpuserve.quant import quantize_online
from tests.helpers.fake_executor import fake_config
from tests.helpers.tiny import tiny_model

_C = pytest.importorskip("cpuserve._C")


def opened(quantize, activation_bits):
    """An executor of a tiny model."""
    from cpuserve.runtime.native import NativeExecutor

    checkpoint = open_checkpoint(tiny_model("llama"))
    program = build_program(spec_from_config(checkpoint.config))
    config = fake_config(
        max_num_batched_tokens=128,
        block_size=32,
        kv_blocks=16,
        max_model_len=128,
        isa=_C.isa_levels()[-1],
        executor="native",
        activation_bits=activation_bits,
        quantize=quantize,
    )
    weights = quantize_online(checkpoint.weights, program, quantize)
    return NativeExecutor(config, program, weights, _C.Team(1, None))


def measured(quantize, activation_bits):
    """The last answer of the roofline of a tiny model, and its lowered program."""
    native = opened(quantize, activation_bits)
    *_, last = native.roofline()
    native.close()
    return last, native.lowered


@pytest.mark.parametrize(("bits", "rows"), [(8, 1), (16, 2)])
def test_two_terms_of_activations_halve_the_limit_of_arithmetic(bits, rows):
    last, lowered = measured("int8_fine", bits)
    limits = msgspec.convert(last["limits"], list[RateLimit])
    assert [limit.requests for limit in limits] == list(REQUESTS)
    for limit in limits:
        seconds = sum(
            max(
                w.num_bytes / last["read_bytes_per_s"],
                2 * w.n * w.k * rows * limit.requests / last["dot_ops_per_s"]["int8"],
            )
            for w in lowered.op_weights
            if w is not None
        )
        assert limit.tokens_per_s == pytest.approx(limit.requests / seconds)


def test_matrices_are_timed_with_one_row_and_with_more():
    native = opened("int8_fine", 8)
    *parts, times = native.row_times()
    native.close()
    assert parts == [[]] * (1 + ROW_ROUNDS * len(ROW_COUNTS))
    assert [rows for rows, _ in times] == list(ROW_COUNTS)
    assert min(seconds for _, seconds in times) > 0
