"""Recurrent layers with decays that follow from tokens, and mixtures of rows with those before."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cpuserve.base.errors import ModelError
from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.operations.recurrent import (
    CONV_CHANNELS,
    RecurrentBuilder,
    ShortConv,
    largest_part,
)
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import StateLayer, whole_lines

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering
    from cpuserve.program.reference.recurrent import Wkv6States, Wkv7States

BEFORE = (1.0, 0.0)  # the taps of a convolution that returns the row of the token before


class Lerp(Op, frozen=True):
    """out = x + (to - x) s, where s is the weight [width], or sigmoid(gates) if it is None.

    plain: s is `gates` itself, not its sigmoid.
    """

    x: ValueId
    to: ValueId
    out: ValueId
    width: int
    weight: str | None
    gates: ValueId | None
    plain: bool = False

    def reads(self) -> tuple[ValueId, ...]:
        """Return x, the value that it moves to, and the gates if there are any."""
        return (self.x, self.to) if self.gates is None else (self.x, self.to, self.gates)

    def lower(self, to: Lowering) -> None:
        to.add(self, weight=to.plain(self.weight, self.width))

    def reference(
        self, at: Interpreter, x: Tensor, to: Tensor, gates: Tensor | None = None
    ) -> Tensor:
        import torch

        if gates is not None:
            return x + (to - x) * (gates if self.plain else torch.sigmoid(gates))
        assert self.weight is not None
        return x + (to - x) * at.vector(self.weight).reshape(-1)


class Wkv7(Op, frozen=True):
    """The generalized delta rule, with the norm of each head.

    r, decay, key, rate: [T, heads * key_width]. v, out: [T, heads * value_width].

    With step = sigmoid(rate), z = key k_k divided by its length, w = exp(-exp(-1/2) sigmoid(decay))
    and k = key (1 + (step - 1) k_a), each head has a state S [key_width, value_width]:

        S_t = w S_(t-1) - step z (x) (S_(t-1)^T z) + k (x) v
        out = LayerNorm(S_t^T r) + (r . (r_k k)) v

    where w multiplies the rows of S. The layer norm has the weights norm and norm_bias
    [heads * value_width]; if they are None, there is no norm.
    The state of a sequence is in state layer `state`. Source: Peng et al. 2025 ("Goose").
    """

    reads_of = ("r", "decay", "key", "v", "rate")
    claimed = True

    r: ValueId
    decay: ValueId
    key: ValueId
    v: ValueId
    rate: ValueId
    out: ValueId
    state: int
    heads: int
    key_width: int
    value_width: int
    k_k: str
    k_a: str
    r_k: str
    norm: str | None
    norm_bias: str | None
    eps: float

    def lower(self, to: Lowering) -> None:
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        to.add(
            self,
            k_k=to.plain(self.k_k, keys),
            k_a=to.plain(self.k_a, keys),
            r_k=to.plain(self.r_k, keys),
            norm=to.plain(self.norm, values),
            norm_bias=to.plain(self.norm_bias, values),
        )

    def reference(
        self, at: Interpreter, r: Tensor, decay: Tensor, key: Tensor, v: Tensor, rate: Tensor
    ) -> Tensor:
        import torch
        from torch.nn import functional as F

        from cpuserve.program.reference.recurrent import WkvRows

        heads = (len(r), self.heads, -1)
        step, g = torch.sigmoid(rate), -torch.exp(torch.tensor(-0.5)) * torch.sigmoid(decay)
        z = F.normalize((key * at.vector(self.k_k)).reshape(heads), dim=-1)
        k = key * (1 + (step - 1) * at.vector(self.k_a))
        removal = z * step.reshape(heads)
        r, g, k, v = (y.reshape(heads) for y in (r, g, k, v))
        states = cast("Wkv7States", at.states[self.state])
        out = torch.empty_like(v)
        for where, part in at.state_parts():
            rows = WkvRows(r[where], g[where], k[where], z[where], removal[where], v[where])
            out[where] = states.run(rows, part)
        if self.norm is not None and self.norm_bias is not None:
            out = F.layer_norm(out, (self.value_width,), None, None, self.eps)
            weight, bias = at.vector(self.norm), at.vector(self.norm_bias)
            out = (out.reshape(len(r), -1) * weight + bias).reshape(out.shape)
        bonus = (r * k * at.vector(self.r_k).reshape(1, self.heads, -1)).sum(dim=-1, keepdim=True)
        return (out + bonus * v).reshape(len(r), -1)

    def make_states(self, slots: int) -> Wkv7States:
        """Return empty states and open rows of the layer."""
        from cpuserve.program.reference.recurrent import Wkv7States

        return Wkv7States(self.heads, self.key_width, self.value_width, slots)


class Wkv6(Op, frozen=True):
    """Linear attention whose decays follow from tokens, with the norm of each head.

    r, decay: [T, heads * key_width]; key: [T, kv_heads * key_width];
    v: [T, kv_heads * value_width]; out: [T, heads * value_width].
    An equal number of heads reads each head of key and v.

    With w = exp(-exp(decay)) and q = scale r, each head has a state S [key_width, value_width]:

        S_t = w S_(t-1) + k (x) v
        out = LayerNorm(S_(t-1)^T q + (q . (bonus k)) v)   k = key
        out = LayerNorm(S_t^T q)                           k = (1 - w) key, if bonus is None

    where w multiplies the rows of S. The layer norm has the weights norm and norm_bias
    [heads * value_width]; if they are None, there is no norm.
    The state of a sequence is in state layer `state`.
    Source: Peng et al. 2024 ("Finch"); without a bonus, its form in Qwen2.5 (llama.cpp).
    """

    reads_of = ("r", "decay", "key", "v")
    claimed = True

    r: ValueId
    decay: ValueId
    key: ValueId
    v: ValueId
    out: ValueId
    state: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    bonus: str | None
    norm: str | None
    norm_bias: str | None
    eps: float
    scale: float

    def lower(self, to: Lowering) -> None:
        keys, values = self.heads * self.key_width, self.heads * self.value_width
        to.add(
            self,
            bonus=to.plain(self.bonus, keys),
            norm=to.plain(self.norm, values),
            norm_bias=to.plain(self.norm_bias, values),
        )

    def reference(
        self, at: Interpreter, r: Tensor, decay: Tensor, key: Tensor, v: Tensor
    ) -> Tensor:
        import torch
        from torch.nn import functional as F

        n, each = len(r), self.heads // self.kv_heads
        r, g = (y.reshape(n, self.heads, -1) for y in (self.scale * r, -torch.exp(decay)))
        k, v = (y.reshape(n, self.kv_heads, -1).repeat_interleave(each, dim=1) for y in (key, v))
        bonus = None
        if self.bonus is None:
            k = k * (1 - torch.exp(g))
        else:
            bonus = at.vector(self.bonus).reshape(1, self.heads, -1)
        states = cast("Wkv6States", at.states[self.state])
        out = torch.empty_like(v)
        for where, part in at.state_parts():
            out[where] = states.run((r[where], g[where], k[where], v[where]), part, bonus)
        if self.norm is not None and self.norm_bias is not None:
            out = F.layer_norm(out, (self.value_width,), None, None, self.eps)
            weight, bias = at.vector(self.norm), at.vector(self.norm_bias)
            return out.reshape(n, -1) * weight + bias
        return out.reshape(n, -1)

    def make_states(self, slots: int) -> Wkv6States:
        """Return empty states and open rows of the layer."""
        from cpuserve.program.reference.recurrent import Wkv6States

        return Wkv6States(self.heads, self.key_width, self.value_width, slots)


class WkvBuilder(RecurrentBuilder):
    """Appends recurrent layers with decays that follow from tokens."""

    def row_before(self, x: ValueId) -> ValueId:
        """Return the row of x of the token before each token, or zeros: [T, width of x]."""
        channels = self._width(x)
        each = largest_part(channels, CONV_CHANNELS)
        out, state = self._value("row before", channels), len(self._states)
        sizes = (len(BEFORE), "", None, 0, channels // each, False)
        self._ops.append(ShortConv(x, out, state, channels, *sizes, fixed=BEFORE))
        self._states.append(StateLayer(channels // each, each, STATE_CHUNK * each))
        return out

    def lerp(
        self,
        x: ValueId,
        to: ValueId,
        name: str | None = None,
        *,
        shape: tuple[int, ...] = (),
        gates: ValueId | None = None,
        plain: bool = False,
    ) -> ValueId:
        """Return x + (to - x) s: [T, width of x].

        name: the full name of the weight s; None: s is sigmoid(gates), or `gates` if `plain`.
        shape: the shape of the weight, if it is not [width of x].
        """
        width = self._width(x)
        self._check_width("lerp", to, width)
        if (name is None) == (gates is None):
            msg = "lerp: there must be either a weight or gates"
            raise ModelError(msg)
        weight = None if name is None else self._need(name, shape or (width,), "vector")
        if gates is not None:
            self._check_width("lerp: gates", gates, width)
        out = self._value(f"{name or 'gated'} lerp", width)
        if gates is not None and plain:
            self._keep_exact(gates, steps=2)
        self._ops.append(Lerp(x, to, out, width, weight, gates, plain))
        return out

    def wkv7(
        self,
        inputs: tuple[ValueId, ValueId, ValueId, ValueId, ValueId],
        name: str,
        *,
        heads: int,
        norm: bool,
        eps: float,
    ) -> ValueId:
        """Return the generalized delta rule: [T, width of v].

        inputs: r, decay, key, v and rate (see `Wkv7`).
        The weights of layer `name` are k_k, k_a and r_k [heads, width of a key], and with `norm`
        g_norm.weight and g_norm.bias.
        """
        r, decay, key, v, rate = inputs
        keys, values = self._width(r), self._width(v)
        if heads < 1 or keys % heads or values % heads:
            msg = f"{name}: {keys} and {values} columns cannot form {heads} equal heads"
            raise ModelError(msg)
        for x in (decay, key, rate):
            self._check_width(name, x, keys)
        sizes = (heads, keys // heads, values // heads)
        k_k = self._need(f"{name}.k_k", (keys,), "vector")
        k_a = self._need(f"{name}.k_a", (keys,), "vector")
        r_k = self._need(f"{name}.r_k", (heads, keys // heads), "vector")
        norms = self._norm_of_heads(name, values, norm=norm)
        out, state = self._value(name, values), len(self._states)
        self._keep_exact(decay, rate, steps=2)
        self._ops.append(Wkv7(*inputs, out, state, *sizes, k_k, k_a, r_k, *norms, eps))
        # A unit of the state is a head. For every open token (a token after the closed state) it
        # also keeps three rows as wide as a key, and two as wide as a value.
        _, key_width, value_width = sizes
        row = 3 * whole_lines(key_width) + 2 * whole_lines(value_width)
        self._states.append(StateLayer(heads, key_width * value_width, STATE_CHUNK * row))
        return out

    def wkv6(
        self,
        inputs: tuple[ValueId, ValueId, ValueId, ValueId],
        name: str,
        *,
        heads: int,
        kv_heads: int,
        bonus: bool,
        norm: bool,
        eps: float,
        scale: float,
    ) -> ValueId:
        """Return linear attention whose decays follow from tokens: [T, heads * width of a value].

        inputs: r, decay, key and v (see `Wkv6`).
        The weights of layer `name` are, with `bonus`, bonus [heads, width of a key], and with
        `norm` g_norm.weight and g_norm.bias.
        """
        r, decay, key, v = inputs
        keys, values = self._width(r), self._width(v)
        if heads < 1 or kv_heads < 1 or heads % kv_heads or keys % heads or values % kv_heads:
            msg = f"{name}: {keys} and {values} columns cannot form {heads} and {kv_heads} heads"
            raise ModelError(msg)
        self._check_width(name, decay, keys)
        self._check_width(name, key, keys // heads * kv_heads)
        key_width, value_width = keys // heads, values // kv_heads
        u = self._need(f"{name}.bonus", (heads, key_width), "vector") if bonus else None
        norms = self._norm_of_heads(name, heads * value_width, norm=norm)
        out, state = self._value(name, heads * value_width), len(self._states)
        sizes = (heads, kv_heads, key_width, value_width)
        self._keep_exact(decay, steps=2)
        self._ops.append(Wkv6(*inputs, out, state, *sizes, u, *norms, eps, scale))
        # Every open token keeps its key, the decay of each row until it, and its value.
        row = 2 * whole_lines(key_width) + whole_lines(value_width)
        self._states.append(StateLayer(heads, key_width * value_width, STATE_CHUNK * row))
        return out

    def _norm_of_heads(self, at: str, values: int, *, norm: bool) -> tuple[str | None, str | None]:
        """Return the weights of the norm of each head in layer `at`, if there is one."""
        if not norm:
            return None, None
        weight = self._need(f"{at}.g_norm.weight", (values,), "vector")
        return weight, self._need(f"{at}.g_norm.bias", (values,), "vector")
