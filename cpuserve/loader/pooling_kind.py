"""Chooses how a model makes vectors or scores: from --pooling, its modules, its head, its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.loader.modules import Stack, read_stack
from cpuserve.loader.pooling import can_judge, checkpoint_pooling, classifier, ranker
from cpuserve.loader.tasks import has_tasks
from cpuserve.loader.token_heads import ARCHITECTURE, has_token_heads
from cpuserve.models import FAMILIES, architecture_of, has_no_head
from cpuserve.models.config import read_architectures

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile
    from cpuserve.loader.safetensors import SafetensorsStore


class Files(Protocol):
    """The files of a model; `gguf` is None for a directory."""

    path: Path

    @property
    def gguf(self) -> GgufFile | None:
        """The GGUF file."""

    @property
    def has_safetensors(self) -> bool:
        """Whether a directory has safetensors files."""

    @property
    def safetensors(self) -> SafetensorsStore:
        """The tensors of a directory."""


@dataclass
class ModelKind:
    """The results of a model, as its files say; encoder: as ModelSpec.encoder."""

    files: Files
    config: Mapping[str, Any]
    encoder: bool

    def __post_init__(self) -> None:
        """Read the names of the architecture."""
        self.name = architecture_of(self.config)
        self.masked = next(iter(read_architectures(self.config)), "") in FAMILIES.masked

    @cached_property
    def stack(self) -> Stack:
        """The modules of a directory; ModelError if they do not fit this architecture."""
        stack, reason = read_stack(self.files.path) if self.files.gguf is None else Stack(), ""
        if stack.scores and not self.encoder:
            reason = f"compute scores of pairs, which is not supported for the decoder {self.name}"
        if stack.task == "sequence-classification" and classifier(self.config) is None:
            reason = f"need a head for labels, which {self.name} does not have"
        if stack.splade and not self.masked:
            reason = f"are SPLADE, and {self.name} has no head for it"
        if reason:
            msg = f"{self.files.path}: its modules {reason}"
            raise ModelError(msg)
        return stack

    def pooling(self, option: str | None) -> tuple[str, str]:
        """Return (pooling, reason); see EngineConfig.pooling. wanted: the value of --pooling.

        Raises:
            ConfigError: the model has no such pooling.
            ModelError: a setting of the files is not supported.
        """
        if option in (None, "auto"):
            return self._of_files()
        return self._checked(option), "requested"

    def _checked(self, pooling: str) -> str:
        if self.encoder and pooling == "none":
            msg = f"--pooling none: {self.name} is an encoder, which generates no text"
            raise ConfigError(msg)
        if pooling == "none":  # no module computes anything
            return pooling
        ranks = ranker(self.config) is not None or can_judge(self.config)
        if pooling == "rank" and not ranks and self.stack.num_scores != 1:
            msg = f"--pooling rank: {self.name} is not a reranker, which has a head"
            raise ConfigError(msg)
        if pooling == "classify" and not self.stack.scores:
            head = classifier(self.config)
            if head is None:
                msg = f"--pooling classify: {self.name} is no classifier, which has a head"
                raise ConfigError(msg)
            return head[0]
        if pooling == "splade" and not self.masked:
            msg = f"--pooling splade: {self.name} has no head that predicts masked tokens"
            raise ConfigError(msg)
        return pooling

    def _of_files(self) -> tuple[str, str]:
        files, stack = self.files, self.stack
        if stack.answers is not None:
            stack.answers.refuse(
                "scores answers to a prompt: --pooling rank uses the prompt of Qwen3-Reranker, and "
                "--pooling none generates text"
            )
        if stack.scores:
            return checkpoint_pooling(files.path, None, stack)
        if (ranker_pooling := ranker(self.config)) is not None:
            return "rank", f"{ranker_pooling} of one label is a reranker"
        if (head := classifier(self.config)) is not None:
            return head[0], f"{head[1]} is a classifier"
        pooling, reason = checkpoint_pooling(files.path, files.gguf, stack)
        if pooling != "none":
            return pooling, reason
        if self.masked:
            return "splade", "its head predicts masked tokens"
        if self.encoder and self._has_token_heads():
            return "first", "BGE-M3 has further heads"
        if has_tasks(self.config):
            return "last", "jina-embeddings v5 takes the vector of the last token"
        if self.encoder:
            return "mean", "the default of sentence-transformers"
        if has_no_head(self.name):
            return "last", f"{self.name} has no output head"
        return pooling, reason

    def _has_token_heads(self) -> bool:
        if self.name != ARCHITECTURE or not self.files.has_safetensors:
            return False
        return has_token_heads(self.files.path, self.files.safetensors.names())
