"""The recurrent layers of RWKV, and mixtures of rows with the rows of the tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.errors import ModelError
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
    from cpuserve.program.reference.recurrent import Wkv7States

BEFORE = (1.0, 0.0)  # the taps of a convolution that returns the row of the token before


class Lerp(Op, frozen=True):
    """out = x + (to - x) s, where s is the weight [width], or sigmoid(gates) if it is None."""

    x: ValueId
    to: ValueId
    out: ValueId
    width: int
    weight: str | None
    gates: ValueId | None

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
            return x + (to - x) * torch.sigmoid(gates)
        assert self.weight is not None
        return x + (to - x) * at.vector(self.weight).reshape(-1)


class Wkv7(Op, frozen=True):
    """The generalized delta rule of RWKV 7, with the norm of each head.

    r, decay, key, rate: [T, heads * key_width]. v, out: [T, heads * value_width].

    With step = sigmoid(rate), z = key k_k divided by its length, w = exp(-exp(-1/2) sigmoid(decay))
    and k = key (1 + (step - 1) k_a), each head has a state S [key_width, value_width]:

        S_t = w S_(t-1) - step z (x) (S_(t-1)^T z) + k (x) v
        out = LayerNorm(S_t^T r) + (r . (r_k k)) v

    where w multiplies the rows of S. The layer norm has the weights norm and norm_bias
    [heads * value_width]; if they are None, there is no norm.
    The state of a sequence is in state layer `state`. Source: Peng et al. 2025 (RWKV-7 "Goose").
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


class WkvBuilder(RecurrentBuilder):
    """Appends the recurrent layers of RWKV."""

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
    ) -> ValueId:
        """Return x + (to - x) s: [T, width of x].

        name: the full name of the weight s; None: s is sigmoid(gates).
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
        self._ops.append(Lerp(x, to, out, width, weight, gates))
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
        """Return the generalized delta rule of RWKV 7: [T, width of v].

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
        norms: tuple[str | None, str | None] = (None, None)
        if norm:
            at = f"{name}.g_norm"
            norms = (
                self._need(f"{at}.weight", (values,), "vector"),
                self._need(f"{at}.bias", (values,), "vector"),
            )
        out, state = self._value(name, values), len(self._states)
        self._ops.append(Wkv7(*inputs, out, state, *sizes, k_k, k_a, r_k, *norms, eps))
        # A unit of the state is a head. For every open token (a token after the closed state) it
        # also keeps three rows as wide as a key, and two as wide as a value.
        _, key_width, value_width = sizes
        row = 3 * whole_lines(key_width) + 2 * whole_lines(value_width)
        self._states.append(StateLayer(heads, key_width * value_width, STATE_CHUNK * row))
        return out
