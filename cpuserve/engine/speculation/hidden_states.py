"""HiddenStates: what the steps of a head read, from the steps of the model and from its own."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.ids import SlotId
from cpuserve.core.step import RowResult, SeqChunk
from cpuserve.engine.speculation.texts import DraftTexts

if TYPE_CHECKING:
    from cpuserve.loader.speculation.guess_heads import GuessHead
    from cpuserve.runtime.executor import Executor, Float32, StepRows

# A random number is a function of seed + WEYL * (position of the sampled token + 1), modulo 2^64
# (`uniform` in csrc/kernels/table/sampling.h).
WEYL = 0x9E3779B97F4A7C15


class HiddenStates:
    """The hidden states of the model's last step and of the head's last one, for the next step.

    texts: the texts of the head, with its executor.
    target: the executor of the model.
    head: the head that the executor of `texts` runs.
    rows: the rows of the model's last step, by request slot.
    """

    def __init__(self, texts: DraftTexts, target: Executor, head: GuessHead) -> None:
        self.rows: dict[int, StepRows] = {}
        self._texts = texts
        self._target = target
        self._ids = head.ids
        # The columns of a row of the media buffer: for EAGLE-3 heads, the head's own hidden state
        # and then the inputs of the model's layers; for other heads, the one or the other.
        self._columns = head.program.media_width
        self._own_columns = head.spec.width if head.layers else 0
        self._last_rows: dict[SlotId, int] = {}  # of each text's last token in the last step

    def take_step(self) -> None:
        """Note the rows of the step that the model has run."""
        self.rows = self._target.step_rows()

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; each token has a hidden state of the model, or of the head's last step.

        chunks: their `media` are rows of the model's last step; None = the head's last row of the
          text. All chunks have the one or the other.
        """
        executor = self._texts.executor
        head_rows = [self._last_rows[chunk.slot] for chunk in chunks if chunk.media is None]
        model_rows = [row for chunk in chunks for row in chunk.media or ()]
        source = executor if head_rows else self._target
        states = source.read_hidden(np.array(head_rows or model_rows, np.int32))
        executor.write_media(0, self._as_media(states, of_head=bool(head_rows)))
        offsets = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
        for chunk, begin, end in zip(chunks, offsets, offsets[1:], strict=False):
            chunk.media = list(range(begin, end))
            self._last_rows[chunk.slot] = end - 1
        results = self._texts.run(chunks)
        if self._ids is not None:
            for row in results:
                row.token = int(self._ids[row.token]) if row.token >= 0 else row.token
        return results

    def _as_media(self, states: Float32, *, of_head: bool) -> Float32:
        """Return rows of the media buffer with hidden states of the head, or else of the model."""
        if not self._own_columns:
            return states
        rows = np.zeros((len(states), self._columns), np.float32)
        if of_head:
            rows[:, : self._own_columns] = states
        else:
            rows[:, self._own_columns :] = states
        return rows
