"""Embeddings of n-grams: hashed ids of a token and the tokens before it select rows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from cpuserve.base.errors import ModelError
from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.operations.dense import gathers, lookup_table
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import StateLayer

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering
    from cpuserve.program.reference.rows import LastIds

MOST_IDS = 1 << 24  # states keep token ids as fp32, which has all integers up to 2^24


class NgramEmbed(Op, frozen=True):
    """For each token, one table row per hash head (a hash of an n-gram): out [T, heads * width].

    sizes: the number of table rows of each head. The rows of all heads follow one another
      in `weights` [rows, width]; the last matrix may have fewer rows.
    multipliers: odd numbers m_0, m_1, ..., one for each token of the longest n-gram.
    end: the token id that ends the context of n-grams.
    state: the state layer with the last ids of a sequence.

    The heads form len(multipliers) - 1 equal groups, for n-grams of n = 2, 3, ... tokens.
    With the ids t_0 (the token), t_1 (the token before it) and so on,
    a head of n-grams reads its row number (t_0 m_0 xor t_1 m_1 ... xor t_(n-1) m_(n-1)) mod size.
    Tokens before the sequence count as `end`.
    Tokens before the last `end` among t_1, t_2, ... count as `end` as well.

    Source: transformers modeling_qwen4_exp.
    """

    reads_of = ()
    claimed = True

    out: ValueId
    state: int
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    width: int
    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    end: int

    def lower(self, to: Lowering) -> None:
        gathered = gathers(to, *self.weights)
        matrices = [
            lookup_table(to, name, rows, self.width, gathered)
            for name, rows in zip(self.weights, self.rows, strict=True)
        ]
        to.add(self, matrices=matrices)

    def looked_up(self) -> tuple[str, ...]:
        """Return the parts of the table, by name."""
        return self.weights

    def reference(self, at: Interpreter) -> Tensor:
        import torch

        states = cast("LastIds", at.states[self.state])
        ids = torch.from_numpy(at.step.token_ids).long()
        out = torch.empty(len(ids), len(self.sizes) * self.width)
        for where, part in at.state_parts():
            found = self._row_numbers(states.run(ids[where], part, self.end))
            out[where] = self._read(at, found).reshape(len(found), -1)
        return out

    def _row_numbers(self, ids: Tensor) -> Tensor:
        """Return each head's row number [T, heads]; ids [T, n]: a token, the one before, ..."""
        import torch

        each = len(self.sizes) // (len(self.multipliers) - 1)
        found, first = [], 0
        for head, size in enumerate(self.sizes):
            mixed = ids[:, 0] * self.multipliers[0]
            for back in range(1, 2 + head // each):
                mixed = mixed ^ (ids[:, back] * self.multipliers[back])
            found.append(mixed % size + first)
            first += size
        return torch.stack(found, dim=1)

    def _read(self, at: Interpreter, rows: Tensor) -> Tensor:
        """Return the rows `rows` of the table, [*rows.shape, width]."""
        import torch

        from cpuserve.program.reference.quantized import QuantMatrix

        out = torch.empty(*rows.shape, self.width)
        for i, name in enumerate(self.weights):
            here = rows // self.rows[0] == i
            weight, own = at.matrix(name), rows[here] - i * self.rows[0]
            out[here] = weight.rows(own) if isinstance(weight, QuantMatrix) else weight[own].float()
        return out

    def make_states(self, slots: int) -> LastIds:
        """Return `slots` empty state slots for the last token ids of sequences."""
        from cpuserve.program.reference.rows import LastIds

        return LastIds(len(self.multipliers) - 1, slots)


class NgramsBuilder(BaseBuilder):
    """Appends embeddings of n-grams."""

    def ngram_embed(
        self,
        name: str,
        *,
        width: int,
        rows: Sequence[int],
        sizes: Sequence[int],
        multipliers: Sequence[int],
        end: int,
    ) -> ValueId:
        """Return the n-gram embeddings of the tokens: [T, len(sizes) * width].

        rows: the number of rows of each part of the table;
          the parts are `name`.shard_0.weight, `name`.shard_1.weight and so on.
          See `NgramEmbed` for the other parameters.
        """
        groups = len(multipliers) - 1
        if not 1 <= groups < STATE_CHUNK or len(sizes) % groups or sum(sizes) > sum(rows):
            msg = f"{name}: {len(sizes)} heads of n-grams do not fit {groups} lengths and the table"
            raise ModelError(msg)
        if self._spec.vocab > MOST_IDS:
            msg = f"{name}: n-grams of {self._spec.vocab} token ids, of at most {MOST_IDS}"
            raise ModelError(msg)
        weights = tuple(
            self._matrix(f"{name}.shard_{i}", count, width, use="exact")
            for i, count in enumerate(rows)
        )
        out, state = self._value(name, len(sizes) * width), len(self._states)
        hashes = (tuple(sizes), tuple(multipliers), end)
        self._ops.append(NgramEmbed(out, state, weights, tuple(rows), width, *hashes))
        # A unit of the state is a head. It keeps the last ids before the chunk (of STATE_CHUNK
        # tokens), and the ids of the tokens of the chunk so far (open tokens).
        self._states.append(StateLayer(len(sizes), groups, STATE_CHUNK))
        return out
