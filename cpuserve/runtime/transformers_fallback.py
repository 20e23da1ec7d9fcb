"""Run models that cpuserve does not implement with the transformers library, which is slow.

Keys and values are in KV blocks as in other executors,
so scheduling, preemption and shared blocks need no special case.
Before the forward pass of a sequence, its keys and values are copied to a DynamicCache;
afterwards the new ones are copied back to KV blocks.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpuserve.base.errors import ModelError
from cpuserve.config.engine import EngineConfig
from cpuserve.models import find_model
from cpuserve.program.view import KeptTables, StepView, check_step, key_slots, view
from cpuserve.runtime.executor import Executor, Float32, StepArrays
from cpuserve.runtime.torch_executor import TorchSampling

ProgressFn = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

BLOCK = 32  # tokens of a KV block
TRIED = 8  # tokens of the text that shows whether a model reads later tokens
OTHER_STATE = (
    "this architecture keeps other state than keys and values of every token; "
    "cpuserve cannot run it through transformers"
)


class TransformersExecutor(TorchSampling, Executor):
    """The executor that runs a causal language model of transformers from a local directory.

    Only safetensors are read, and code of the checkpoint is never run.
    Raises ModelError for a model that transformers cannot load,
    or that has other state than keys and values.
    """

    def __init__(self, config: EngineConfig, progress: ProgressFn | None = None) -> None:
        torch.set_num_threads(config.threads)
        model = load_model(Path(config.model_path), config.dtype)
        paged = PagedModel(model, config.kv_blocks)
        super().__init__(config, paged.vocab, paged)
        self.vocab = paged.vocab
        known = find_model(config.architecture) is not None
        log.warning(
            "%s runs through transformers, %s: every sequence of a step runs alone, one torch call "
            "a module, and copies its keys and values; expect a small part of the speed of %s",
            config.architecture,
            "as requested" if known else "because cpuserve does not implement it",
            "its program in cpuserve" if known else "a supported model",
        )
        if progress:
            progress("load", 1, 1)

    def tap(self, arrays: StepArrays, op_index: int) -> tuple[list[Float32], Float32]:  # noqa: ARG002
        """Raise ValueError, because the model has no ops."""
        msg = "a model that runs through transformers has no program ops"
        raise ValueError(msg)


def load_model(path: Path, dtype: str) -> Any:
    """Return the transformers model in `path`.

    Raises:
        ModelError: transformers cannot load the model; the text is the first line of its message.
    """
    import transformers

    if not path.is_dir():
        msg = f"{path} is no model directory: only those can run through transformers"
        raise ModelError(msg)
    quiet: Any = transformers.utils.logging
    quiet.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises any exception of its libraries
        first = str(error).strip().partition("\n")[0][:300]
        msg = f"transformers cannot load {path}: {first or type(error).__name__}"
        raise ModelError(msg) from error
    model, info = loaded
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:5])
        msg = f"{path} lacks {len(info['missing_keys'])} tensors of the model: {names}"
        raise ModelError(msg)
    return model.eval()


class PagedModel:
    """A transformers model with a paged KV cache: keys and values are in blocks of 32 tokens."""

    def __init__(self, model: Any, num_blocks: int) -> None:
        self.cancelled = False
        self._model = model
        self._num_blocks = num_blocks
        self._kept = KeptTables()
        parameters = inspect.signature(model.forward).parameters
        self._picks_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        # From transformers 5.24 on the argument is called `cache`; its old name causes a warning.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        if getattr(model, "_is_stateful", False):  # recurrent models in transformers
            raise ModelError(OTHER_STATE)
        logits, cache = self._forward(torch.zeros(1, dtype=torch.long), 0, None, torch.tensor([0]))
        self.vocab = int(logits.shape[1])
        self._check_order()
        # Pages of an empty tensor take no memory until something is written to them.
        self._pools = [
            tuple(_pool(state, num_blocks * BLOCK) for state in (layer.keys, layer.values))
            for layer in _layers(cache)
        ]

    def _check_order(self) -> None:
        """Raise ModelError if the logits of a token depend on later tokens.

        BERT and its relatives compute so unless their config has "is_decoder", and steps would
        not have the logits of one pass over a text.
        """
        half = torch.arange(TRIED // 2)
        same, _ = self._forward(torch.cat([half, half]) % self.vocab, 0, None, half)
        other, _ = self._forward(torch.cat([half, half + len(half)]) % self.vocab, 0, None, half)
        # Experts may sum in another order; that is less than the root of the rounding error.
        bound = torch.finfo(self._model.dtype).eps ** 0.5 * same.abs().max()
        if not (same - other).abs().max() <= bound:
            msg = (
                f"{type(self._model).__name__} reads later tokens as well, so it cannot write a "
                'text; if it was trained to, its config.json needs "is_decoder": true'
            )
            raise ModelError(msg)

    def hidden(self, arrays: StepArrays) -> Tensor:
        """Run the step; return the logits [R, vocab] of its logit rows."""
        step = view(arrays, self._kept)
        check_step(step, vocab=self.vocab, num_blocks=self._num_blocks, block=BLOCK)
        self._kept.keep(step)
        rows = torch.from_numpy(step.row_token).long()
        out = torch.zeros(len(rows), self.vocab)
        for seq in range(step.num_seqs):
            if self.cancelled:  # a forward pass of transformers cannot be interrupted
                msg = "the step was cancelled"
                raise RuntimeError(msg)
            at = step.queries(seq)
            mine = (rows >= at.start) & (rows < at.stop)
            logits = self._run_sequence(step, seq, rows[mine] - at.start)
            out[mine] = logits
        return out

    def release(self, slot: int) -> None:
        """Drop the block tables of request slot `slot`."""
        self._kept.release(slot)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `hidden` unchanged: the results of the method `hidden` are logits already."""
        return hidden

    def kv_parts(self, block: int) -> list[Tensor]:
        """Return views of KV block `block`: for each layer keys, then values, [32, heads, d]."""
        at = slice(block * BLOCK, (block + 1) * BLOCK)
        return [state[at] for layer in self._pools for state in layer]

    def closed_states(self, slot: int) -> list[Tensor]:  # noqa: ARG002
        """Return [], because this executor refuses models with recurrent layers."""
        return []

    def _run_sequence(self, step: StepView, seq: int, rows: Tensor) -> Tensor:
        at = step.queries(seq)
        tokens = torch.from_numpy(step.token_ids[at]).long()
        slots = torch.from_numpy(key_slots(step, seq, BLOCK)).long()
        start = len(slots) - len(tokens)
        past = slots[:start] if start else None
        logits, cache = self._forward(tokens, start, past, rows)
        for layer, (keys, values) in zip(_layers(cache), self._pools, strict=True):
            keys[slots[start:]] = layer.keys[0, :, start:].transpose(0, 1)
            values[slots[start:]] = layer.values[0, :, start:].transpose(0, 1)
        return logits

    def _forward(
        self, tokens: Tensor, start: int, past: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, Any]:
        """Run `tokens` at positions start, start + 1, ...; return (fp32 logits of `rows`, cache).

        past: the KV slots of the keys before `start`; None = there are no such keys.
        """
        from transformers import DynamicCache

        with torch.inference_mode():
            cache = DynamicCache()
            if past is not None:
                for i, (keys, values) in enumerate(self._pools):
                    # The shape [keys, heads, d] becomes [1, heads, keys, d].
                    cache.update(
                        keys[past].transpose(0, 1)[None], values[past].transpose(0, 1)[None], i
                    )
            options: dict[str, Any] = {self._cache_name: cache, "use_cache": True}
            if self._takes_positions:
                options["position_ids"] = torch.arange(start, start + len(tokens))[None]
            if self._picks_rows and len(rows):  # an empty list would mean all rows
                options["logits_to_keep"] = rows
            out = self._model(tokens[None], **options)
            logits = out.logits[0]
            return (logits if "logits_to_keep" in options else logits[rows]).float(), cache


def _layers(cache: Any) -> list[Any]:
    """Return the layers of a DynamicCache; ModelError if one stores more than keys and values."""
    from transformers.cache_utils import DynamicLayer

    layers = list(cache.layers)
    if not layers or any(type(x) is not DynamicLayer or x.keys is None for x in layers):
        raise ModelError(OTHER_STATE)
    return layers


def _pool(state: Tensor, slots: int) -> Tensor:
    """Return an empty pool [slots, heads, d]; heads, d and dtype as in `state` [1, heads, 1, d]."""
    return torch.empty(slots, state.shape[1], state.shape[3], dtype=state.dtype)
