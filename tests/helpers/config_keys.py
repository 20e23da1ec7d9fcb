"""The keys of a config.json that transformers reads, and the effect of a change in both models.

A `Walk` has a tiny checkpoint of a family. `changes()` yields its config with one key changed at a
time; `outcome()` says whether the logits of both models change alike.
"""

from __future__ import annotations

import atexit
import copy
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.initialization import no_init_weights

from cpuserve.base.errors import CpuserveError
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.parts import stored_needs
from tests.helpers.encoders import encoder_of, without_pooler
from tests.helpers.oracle import tensors_of, transformers_of
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import ENCODERS, FAMILIES, make_model_module, tiny_model

TOKENS = [(i * 37 + i * i * 5) % 490 + 10 for i in range(72)]
MISSING = "(left out)"
# Keys that are no hyperparameters: names, and settings of a run of transformers.
GENERAL = {
    *("architectures", "model_type", "dtype", "torch_dtype"),
    *("transformers_version", "name_or_path"),
    *("attribute_map", "sub_configs", "id2label", "label2id", "num_labels", "problem_type"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "use_cache"),
    *("quantization_config", "auto_map", "has_no_defaults_at_init", "is_heterogeneous"),
    *("base_config_key", "keys_to_ignore_at_inference", "torchscript"),
    *("base_model_tp_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_ep_plan"),
    # Parts of other models that transformers looks for, and its caches.
    *("decoder", "generator", "text_encoder", "text_config", "mtp_layer_types", "kv_sharing_modes"),
    *("vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"),
    *("number_of_conv_states", "default_rope_type", "output_cross_attentions"),
    "chunk_size_feed_forward",  # the same results, computed in parts
    *("sub_configs_defaults", "default_theta", "ignore_keys_at_rope_validation"),
}
# Keys that only the training of a model reads, or the choice of a token.
TRAINING = re.compile(
    "dropout|pdrop|drop_rate|initializer|init_std|aux_loss|z_loss|jitter|output_router|^eos_|^bos_"
    "|^decoder_start|^forced_|^summary_|gradient|^pretraining_tp$|^layerdrop$"
)
ACTS = ("gelu", "relu", "silu", "gelu_pytorch_tanh")


@contextmanager
def recorded_reads(names: set[str], kind: Any = None) -> Iterator[None]:
    """Add to `names` the attributes of config objects that are read meanwhile.

    kind: the class of these objects; None = all.
    """
    from transformers import PreTrainedConfig

    kind = kind or PreTrainedConfig
    plain = kind.__getattribute__

    def read(self, key):
        value_is_missing = False
        try:
            value = plain(self, key)
        except AttributeError:
            value_is_missing = True
            raise
        finally:
            if not key.startswith("_") and (value_is_missing or not callable(value)):
                names.add(key)
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__getattribute__", read)
        yield


@contextmanager
def without_messages() -> Iterator[None]:
    """Let transformers not write configs as text: it does so for messages that nobody sees.

    That is a third of the time in which it makes a config and a tiny model of it.
    """
    from transformers import PreTrainedConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
        yield


def other_values(value: Any, hint: str = "") -> list[Any]:
    """Return some values of the type of `value` that differ from it."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2] if value else [1, 2]
    if isinstance(value, float):
        return [0.05] if value < 0.01 else [value * 1.5, 0.0]
    if isinstance(value, str):
        return [act for act in ACTS if act != value]
    if isinstance(value, list):
        out = [value[::-1], value[1:] + value[:1], *([item] * len(value) for item in value[:1])]
        if value and all(isinstance(v, bool) for v in value):
            out += [[not v for v in value]]
        elif value and all(isinstance(v, int | float) for v in value):
            out += [[v * 2 for v in value], [v + 1 for v in value]]
        return [*(item for item in out if item != value), None]
    if value is not None:
        return []
    kinds = {"bool": [True, False], "int": [2, 20], "float": [0.5], "str": ["gelu"]}
    kinds = {kind: values for kind, values in kinds.items() if not hint or kind in hint}
    return [value for values in kinds.values() for value in values]


# Families with a model of transformers.
PLAIN = ("rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2")
WALKED = tuple(family for family in (*FAMILIES, *ENCODERS) if family not in PLAIN)


class Walk:
    """A tiny model of a family, here and in transformers, whose keys can be changed."""

    def __init__(self, family: str) -> None:
        self.encodes, path = family in ENCODERS, tiny_model(family)
        self.config = json.loads((path / "config.json").read_text())
        self.model = _theirs(path, self.encodes)
        self.state = self.model.state_dict()
        self.tensors = tensors_of(path)
        self.program = program_of(self.config)
        self.needs, self.text = needs_of(self.program), text_of(self.program)
        self.read: set[str] = set()
        self.theirs_config = self.model.config.__class__
        fields = getattr(self.theirs_config, "__dataclass_fields__", {})
        self.hints = {name: str(field.type) for name, field in fields.items()}
        with recorded_reads(self.read):
            self.theirs = self._run_theirs(self._built(self.config))
        self.ours = run(self.program, self.tensors)

    def base(self) -> str:
        """Return the outcome of the config without a change; "no effect" if both are equal."""
        assert isinstance(self.theirs, torch.Tensor)
        return self._compared(self.ours, self.theirs)

    def keys(self) -> list[str]:
        """Return the keys that the config has or that transformers reads."""
        read = {*self.read, *vars(self._config_of(self.config))}
        names = {*read, *self.config} - GENERAL
        return sorted(n for n in names if not n.startswith("_") and not TRAINING.search(n))

    def _config_of(self, config: Mapping[str, Any]) -> Any:
        made = self.theirs_config.from_dict(copy.deepcopy(dict(config)))
        made._attn_implementation = "eager"
        return made

    def _theirs_of(self, config: Mapping[str, Any]) -> Any:
        with without_messages(), no_init_weights():  # all weights come from the checkpoint
            return self._built(config)

    def _built(self, config: Mapping[str, Any]) -> Any:
        kind = type(self.model)
        more = without_pooler(kind.__name__) if self.encodes else {}
        return kind(self._config_of(config), **more).eval()

    def _run_theirs(self, model: Any) -> torch.Tensor | str:
        new = model.state_dict()
        if {n: t.shape for n, t in new.items()} != {n: t.shape for n, t in self.state.items()}:
            return "other tensors"
        model.load_state_dict(self.state, assign=True)  # a copy takes longer than the results
        return _rows_of(model, self.encodes)

    def _run_ours(self, program: Any) -> torch.Tensor:
        return self.ours if text_of(program) == self.text else run(program, self.tensors)

    def changes(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield (key, value, config) with one key changed."""
        theirs = self._config_of(self.config)
        for key in self.keys():
            yield from self._changes_of(key, theirs)

    def _changes_of(self, key: str, theirs: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        value = self.config.get(key)
        if key not in self.config:
            with suppress(Exception):  # a config with sizes by layer has no value for all of them
                value = getattr(theirs, key, None)
        if key in ("rope_scaling", "rope_parameters"):
            linear = {"rope_type": "linear", "factor": 4.0}
            for rope in (linear, {**linear, "rope_theta": 3e4}, {"rope_theta": 3e4}):
                yield key, rope, {**self.config, key: rope}
        if hasattr(value, "to_dict"):
            value = value.to_dict()
        if key in self.config:
            yield key, MISSING, {k: v for k, v in self.config.items() if k != key}
        if isinstance(value, Mapping):
            for inner, before in value.items():
                if key in self.config:
                    rest = {k: v for k, v in value.items() if k != inner}
                    yield f"{key}.{inner}", MISSING, {**self.config, key: rest}
                if isinstance(before, Mapping):
                    for part, old in before.items():
                        for new in other_values(old):
                            changed = {**value, inner: {**before, part: new}}
                            yield f"{key}.{inner}.{part}", new, {**self.config, key: changed}
                    continue
                for new in other_values(before):
                    yield f"{key}.{inner}", new, {**self.config, key: {**value, inner: new}}
            return
        for new in other_values(value, self.hints.get(key, "")):
            yield key, new, {**self.config, key: new}

    def outcome(self, key: str, config: dict[str, Any], *, ignored: bool = False) -> str:
        """Return the effect of a change: one of the words below, or "DIFFERENT ...".

        ignored: look only for keys that cpuserve ignores; a key that it reads is "read".
        """
        try:
            program = program_of(config)
        except CpuserveError as error:
            return f"refused: {error}"[:200]
        if ignored and text_of(program) != self.text:
            return "read"
        if ignored and key.partition(".")[0] not in self.read:
            return "not read there"
        if sum(math.prod(need.shape) for need in program.weights) > 3e6:
            return "large"
        try:
            theirs = self._run_theirs(self._theirs_of(config))
        except Exception as error:  # transformers takes no such value
            return f"theirs refuses: {type(error).__name__} {error}"[:160].replace("\n", " ")
        same = needs_of(program) == self.needs
        if isinstance(theirs, str) and same:
            return "other tensors there"
        if isinstance(theirs, str) or not same:
            return self._whole(config)
        ours = self._run_ours(program)
        return self._compared(ours, theirs)

    def _whole(self, config: dict[str, Any]) -> str:
        """Make a new checkpoint, because the config has other tensors."""
        path = copy_config(config)
        try:
            model = _theirs(path, self.encodes)
            theirs = _rows_of(model, self.encodes)
        except Exception as error:
            return f"other tensors: {type(error).__name__} {error}"[:160].replace("\n", " ")
        return self._compared(run(program_of(config), tensors_of(path)), theirs)

    def _compared(self, ours, theirs) -> str:
        if ours.shape != theirs.shape:
            return f"DIFFERENT shapes {tuple(ours.shape)} {tuple(theirs.shape)}"
        if not torch.isfinite(theirs).all():
            return "theirs refuses: not finite"
        spread = float(theirs.max() - theirs.min()) or 1.0
        changed = theirs.shape != self.theirs.shape
        error, moved, mine = (
            float((one - other).abs().max()) / spread
            for one, other in (
                (ours, theirs),
                (theirs, theirs * 0 if changed else self.theirs),
                (ours, ours * 0 if changed else self.ours),
            )
        )
        if not error < 1e-4:
            return f"DIFFERENT by {error:.2g}, theirs moved {moved:.2g}, ours {mine:.2g}"
        return "alike" if moved > 1e-6 or mine > 1e-6 else "no effect"


def copy_config(config: dict[str, Any]) -> Path:
    """Return the directory of a new tiny checkpoint with this config."""
    path = Path(tempfile.mkdtemp(prefix="cpuserve-keys-")) / "model"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    return make_model_module().make_model(config, path, 0)


def program_of(config: Mapping[str, Any]) -> Any:
    """Return the Program of a config; ModelError if it is refused."""
    return build_program(spec_from_config(config))


def text_of(program: Any) -> str:
    """Return all of a Program as a text; programs with the same text compute the same."""
    with np.printoptions(threshold=1 << 30, floatmode="unique"):
        return repr(program)


def run(program: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits [tokens, vocab] of TOKENS, or their rows [tokens, width]."""
    states = {"num_states": 64} if program.states else {}
    interpreter = Interpreter(program, tensors, **states)
    first = interpreter.num_blocks if program.states else 0
    sequence = Sequence(0, list(TOKENS), [5, 2, 9, 1], first)
    return interpreter.run(step(sequence.chunk(len(TOKENS), all_rows(len(TOKENS)))))


def needs_of(program: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a Program needs, by its name."""
    return {need.name: tuple(need.shape) for need in stored_needs(program.weights)}


def _theirs(path: Path, encodes: bool) -> Any:
    return encoder_of(path) if encodes else transformers_of(path)


def _rows_of(model: Any, encodes: bool) -> torch.Tensor:
    with torch.inference_mode():
        out = model(torch.tensor([TOKENS]))
    return out.last_hidden_state[0] if encodes else out.logits[0]
