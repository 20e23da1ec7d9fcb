"""The Interpreter itself: KV cache, emulated rounding, and ops that no model family uses yet."""

from __future__ import annotations

import math

import pytest
import torch

from cpuserve.core.kv.table import BlockTable
from cpuserve.models import spec_from_config
from cpuserve.program.builder import Builder
from cpuserve.program.interpret import Interpreter
from cpuserve.program.reference.attention import chunked_softmax
from cpuserve.program.reference.quantized import (
    GROUP,
    QuantMatrix,
    multiply_grouped,
    quantize_rows,
)
from cpuserve.program.reference.rows import activate
from tests.helpers.oracle import PreciseInterpreter, interpreter_of, program_of, tensors_of
from tests.helpers.rounding import (
    UNIT64,
    doubles,
    largest,
    model_bound,
    program_bound,
    sum_bound,
)
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_config, tiny_model

TOKENS = [(i * 53 + 7) % 509 for i in range(70)]
OF_A_FUNCTION = 64 * UNIT64  # libraries' exp, tanh and erf err by some units, sums of them more


def run_all(interpreter, tokens=TOKENS, blocks=(4, 0, 7)):
    return interpreter.run(step(Sequence(0, list(tokens), list(blocks)).chunk(None, all_rows(70))))


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_stale_slots_never_reach_a_product(mode):
    interpreter = interpreter_of(tiny_model("mistral"), mode=mode)
    clean = run_all(interpreter)
    poisoned = interpreter_of(tiny_model("mistral"), mode=mode)
    for cache in poisoned._cache:
        cache.fill_(math.nan)
    bound = model_bound(tiny_model("mistral"), len(TOKENS)) * largest(clean)
    torch.testing.assert_close(run_all(poisoned), clean, atol=bound, rtol=0)


def test_run_op_by_op_gives_the_logits_of_run():
    interpreter = interpreter_of(tiny_model("qwen3"))
    arrays = step(Sequence(0, list(TOKENS), [1, 2, 3]).chunk(None, all_rows(70)))
    expected = interpreter.run(arrays)
    last = len(interpreter.program.ops) - 1
    got = interpreter.run_op(last, interpreter.run_to(arrays, last))
    bound = model_bound(tiny_model("qwen3"), len(TOKENS)) * largest(expected)
    torch.testing.assert_close(got, expected, atol=bound, rtol=0)


def test_emulated_fp32_equals_the_reference_up_to_summation():
    path = tiny_model("llama")
    reference = run_all(interpreter_of(path, PreciseInterpreter))
    emulated = run_all(interpreter_of(path, PreciseInterpreter, mode="emulated"))
    bound = model_bound(path, len(TOKENS), UNIT64) * largest(reference)
    torch.testing.assert_close(emulated, reference, atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("kind", "kv", "low", "high"),
    [("dense_bf16", "bf16", 1e-3, 3e-2), ("dense_f16", "f16", 1e-6, 3e-3)],
    ids=["bf16", "f16"],
)
def test_emulated_rounding_is_seen_and_small(kind, kv, low, high):
    path = tiny_model("llama3")
    program = program_of(path)
    kinds = {need.name: kind for need in program.weights if need.role == "matrix"}
    reference = run_all(interpreter_of(path))
    emulated = run_all(interpreter_of(path, mode="emulated", kinds=kinds, kv_dtype=kv))
    error = (emulated - reference).norm() / reference.norm()
    assert low < error < high


def test_index_out_of_range_is_refused_before_anything_runs():
    interpreter = interpreter_of(tiny_model("llama"), num_blocks=4)
    sequence = Sequence(0, [1, 2, 3], [4])
    with pytest.raises(ValueError, match=r"block id of the step is outside \[0, 4\)"):
        interpreter.run(step(sequence.chunk()))
    with pytest.raises(ValueError, match=r"token id of the step is outside \[0, 512\)"):
        interpreter.run(step(Sequence(0, [512], [0]).chunk()))
    chunk = Sequence(0, list(range(33)), [0, 1]).chunk()
    chunk.tables = [BlockTable([0])]
    with pytest.raises(ValueError, match="33 keys and 1 blocks of 32"):
        interpreter.run(step(chunk))
    assert all((cache == 0).all() for cache in interpreter._cache)


def test_a_tensor_of_another_shape_is_refused():
    path = tiny_model("llama")
    tensors = tensors_of(path)
    tensors["model.norm.weight"] = torch.ones(63)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(63,\)"):
        Interpreter(program_of(path), tensors)


# -- quantized products -------------------------------------------------------------------------


def random_quant(kind, n=24, k=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    high = 256 if kind == "w8" else 16
    codes = torch.randint(0, high, (n, k), generator=g, dtype=torch.uint8)
    scale = (torch.rand(n, k // 32, generator=g) + 0.5).half().float() / high
    minimum = (torch.rand(n, k // 32, generator=g) - 0.7).half().float()
    zero = {"w8": 128, "w4": 8, "w4m": 0}[kind]
    return QuantMatrix(codes, scale, zero, minimum if kind == "w4m" else None)


def test_q8g32_rows_follow_the_text_of_the_table():
    x = torch.zeros(1, 40)
    x[0, :4] = torch.tensor([2.54, 0.03, -1.27, 0.01])
    q, scale, total = quantize_rows(x, GROUP)
    assert q.shape == (1, 2, 32)
    assert q[0, 0, :4].tolist() == [127.0, 2.0, -64.0, 0.0]  # 1.5 and 0.5 go to even
    assert scale[0].tolist() == [pytest.approx(0.02), 0.0]  # an empty group has scale 0
    assert total[0].tolist() == [65.0, 0.0]


@pytest.mark.parametrize("kind", ["w8", "w4", "w4m"])
def test_quantized_product_is_the_product_of_the_quantized_operands(kind):
    weight = random_quant(kind)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    q, scale, _ = quantize_rows(x, GROUP)
    exact = (q * scale[..., None]).reshape(5, 96).double() @ weight.rows(slice(None)).double().T
    got = multiply_grouped(x, weight, GROUP)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
    plain = x.double() @ weight.rows(slice(None)).double().T
    assert (got - plain).abs().max() > 1e-4  # the activations were quantized


@pytest.mark.parametrize("kind", ["w8", "w4", "w4m"])
def test_a_row_of_a_quantized_product_does_not_depend_on_its_neighbours(kind):
    weight = random_quant(kind)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        multiply_grouped(x, weight, GROUP)[3:4], multiply_grouped(x[3:4], weight, GROUP)
    )


# -- attention and activations ------------------------------------------------------------------


@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sinks"])
def test_chunked_softmax_equals_softmax_across_chunk_borders(with_sink):
    g = torch.Generator().manual_seed(3)
    s = torch.randn(4, 2, 700, generator=g) * 8
    s[0, :, :300] = -torch.inf  # the whole first chunk is masked
    s[1, :, 300:] = -torch.inf
    v = torch.randn(700, 2, 16, generator=g)
    sink = torch.randn(4, 2, 1, generator=g) * 8 if with_sink else None
    every = s if sink is None else torch.cat([s, sink], dim=2)
    p = torch.softmax(every.double(), dim=2)[:, :, :700]
    expected = torch.einsum("nhk,khd->nhd", p, v.double())
    with doubles():
        got = chunked_softmax(s.double(), v.double(), sink if sink is None else sink.double())
    bound = sum_bound(2 * 700, UNIT64) * largest(v)
    torch.testing.assert_close(got, expected, atol=bound, rtol=0)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("none", lambda x: x),
        ("relu", lambda x: max(x, 0.0)),
        ("relu2", lambda x: max(x, 0.0) ** 2),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("quick_gelu", lambda x: x / (1 + math.exp(-1.702 * x))),
        ("sigmoid", lambda x: 1 / (1 + math.exp(-x))),
        ("tanh", math.tanh),
        ("gelu", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        (
            "gelu_tanh",
            lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
    ],
)
def test_activations_are_their_formulas(then, expected):
    x = torch.linspace(-6, 6, 49, dtype=torch.float64)[None]
    wanted = torch.tensor([[expected(float(v)) for v in x[0]]], dtype=torch.float64)
    torch.testing.assert_close(activate(x, then), wanted, atol=OF_A_FUNCTION, rtol=OF_A_FUNCTION)


def test_the_clamped_activation_is_its_formula():
    gate, up = torch.meshgrid(torch.linspace(-9, 9, 19), torch.linspace(-9, 9, 19), indexing="ij")
    x = torch.stack([gate.reshape(-1), up.reshape(-1)], dim=1).double()
    wanted = []
    for g, u in x.tolist():
        g, u = min(g, 7.0), min(max(u, -7.0), 7.0)
        wanted.append([(u + 1) * g / (1 + math.exp(-1.702 * g))])
    got = activate(x, "clamped_swiglu_mul")
    expected = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=OF_A_FUNCTION, rtol=OF_A_FUNCTION)


def build_odd_model():
    """A program of the ops and options that few model families use (Gemma, gpt-oss, ALiBi)."""
    spec = spec_from_config(tiny_config("llama", num_hidden_layers=1, vocab_size=97))
    b = Builder(spec)
    x = b.embed("e", scale=3.0)
    b.position_embed(x, "p", rows=40, offset=1)
    qkv = b.linear(b.rms_norm(x, "n", plus_one=True), ["q", "k", "v"], features=[64, 32, 32])
    b.rope_store_kv(qkv, layer=0, rope=None)
    a = b.attention(qkv, layer=0, scale=0.3, softcap=2.0, sinks="sinks", alibi=True, window=5)
    b.add(b.layer_norm(b.linear(a, "o", features=64), "post", bias=False), to=x)
    g = b.activation(b.linear(x, ["g", "u"], features=32), "gelu_tanh_mul")
    b.linear(g, "d", add_to=x)
    b.logits(x, "head", bias=True, scale=0.5, softcap=4.0)
    return b.finish()


def test_ops_of_coming_families_are_their_formulas():
    program = build_odd_model()
    g = torch.Generator().manual_seed(5)
    w = {n.name: torch.randn(n.shape, generator=g) * 0.2 for n in program.weights}
    ids = [(i * 17 + 3) % 97 for i in range(12)]
    interpreter = PreciseInterpreter(program, w)
    got = interpreter.run(step(Sequence(0, ids, [1]).chunk(None, all_rows(12))))

    d = {name: t.double() for name, t in w.items()}
    x = 3.0 * d["e.weight"][ids] + d["p.weight"][1:13]
    h = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * (1 + d["n.weight"])
    q, k, v = (h @ d[f"{n}.weight"].T for n in "qkv")
    out = torch.zeros(12, 4, 16, dtype=torch.float64)
    for head in range(4):
        for i in range(12):
            keys = range(max(0, i - 4), i + 1)
            scores = []
            for j in keys:
                dot = q[i].view(4, 16)[head] @ k[j].view(2, 16)[head // 2] * 0.3
                scores.append(2.0 * math.tanh(dot / 2.0) - 2.0 ** (-2 * (head + 1)) * (i - j))
            every = torch.tensor([*scores, float(d["sinks"][head])], dtype=torch.float64)
            p = every.softmax(0)
            for j, weight in zip(keys, p[:-1], strict=True):
                out[i, head] += weight * v[j].view(2, 16)[head // 2]
    y = out.view(12, 64) @ d["o.weight"].T
    y = (y - y.mean(1, keepdim=True)) / (y.var(1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    x = x + y * d["post.weight"]
    gate, up = x @ d["g.weight"].T, x @ d["u.weight"].T
    x = x + (torch.nn.functional.gelu(gate, approximate="tanh") * up) @ d["d.weight"].T
    logits = 0.5 * (x @ d["head.weight"].T + d["head.bias"])
    bound = program_bound(program, 12, UNIT64) * largest(logits)
    torch.testing.assert_close(got, 4.0 * torch.tanh(logits / 4.0), atol=bound, rtol=0)
