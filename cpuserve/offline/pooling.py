"""The methods of LLM for models that generate no text: embeddings, labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cpuserve.base.errors import InvalidRequest
from cpuserve.offline.arguments import (
    PromptInput,
    Tokenization,
    as_list,
    one_each,
    tokenization_of,
    without_media,
)
from cpuserve.offline.jobs import UseTqdm
from cpuserve.offline.requests import OneAdapter, RequestMethods, name_of
from cpuserve.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Float32,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.pooling import PoolingParams
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.generation.batch import BatchItem
from cpuserve.serving.models.tasks import default_task, select_task, tasks_of
from cpuserve.serving.prompts.encode import cut_of
from cpuserve.serving.vectors.classes import activated
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened
from cpuserve.serving.vectors.pooling_tasks import (
    data_of,
    embedding_tasks,
    labels_of_task,
    results_of,
    vectors_of,
)
from cpuserve.serving.vectors.similarity import cosine, each_once
from cpuserve.tokenizer.pairs import NO_INSTRUCTION
from cpuserve.tokenizer.tokenizer import named_prompt

if TYPE_CHECKING:
    from cpuserve.tokenizer.conversation import MediaPart


@dataclass(frozen=True, slots=True)
class Pooling:
    """The parameters of one prompt; None = not set."""

    use_activation: bool | None = None
    dimensions: int | None = None
    task: str | None = None
    skip_cache: bool = False

    @classmethod
    def of(cls, given: object) -> Pooling:
        """Return the parameters that `given` sets.

        Raises:
            InvalidRequest: it is no PoolingParams.
        """
        if given is None:
            return cls()
        if not isinstance(given, PoolingParams):
            msg = f"pooling_params must be PoolingParams, got {type(given).__name__}"
            raise InvalidRequest(msg, param="pooling_params")
        skip = bool(given.skip_reading_prefix_cache)
        return cls(given.use_activation, given.dimensions, given.task, skip)

    def activates(self, asked: bool | None) -> bool:
        """Return whether the activation is computed; asked: the argument use_activation of a call.

        Raises:
            InvalidRequest: the argument and the parameter differ.
        """
        own = self.use_activation
        if asked is not None and own is not None and asked != own:
            msg = f"use_activation is {asked}, but {own} in pooling_params: omit one of them"
            raise InvalidRequest(msg, param="use_activation")
        return (own if asked is None else asked) is not False


@dataclass(slots=True)
class PoolingBatch:
    """The requests of one call, with the parameters and the adapter of each.

    media: the pictures of requests by their index, and the settings for these pictures.
    """

    requests: list[RequestOutput]
    params: list[Pooling]
    adapters: Sequence[OneAdapter | None] = field(default_factory=list)
    media: dict[int, tuple[list[MediaPart], Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def task(self) -> str | None:
        """The task that the parameters name; None = none.

        Raises:
            InvalidRequest: they name several.
        """
        found = {own.task for own in self.params}
        if len(found) > 1:
            msg = f"pooling_params name several tasks ({sorted(map(str, found))}): give one"
            raise InvalidRequest(msg, param="pooling_params")
        return next(iter(found), None)

    def check_task(self, task: str, *, dimensions: bool = False, other: Sequence[str] = ()) -> None:
        """Raise InvalidRequest for parameters that do not fit the task.

        dimensions: whether the task has results that can be cut.
        other: synonyms of the task.
        """
        if self.task not in (None, task, *other):
            msg = f"pooling_params has the task {self.task!r}, but this call has the task {task!r}"
            raise InvalidRequest(msg, param="pooling_params")
        if not dimensions and any(own.dimensions is not None for own in self.params):
            msg = f"dimensions is not possible with the task {task}: omit it"
            raise InvalidRequest(msg, param="dimensions")


def pairs_of(queries: Any, documents: Any) -> list[tuple[str, str]]:
    """Return the pairs of texts of `LLM.score`.

    Raises:
        InvalidRequest: a list is empty, their lengths do not fit, or an item is no text.
    """
    first, second = _texts(queries, "queries"), _texts(documents, "documents")
    if len(first) not in (1, len(second)):
        msg = f"{len(first)} queries for {len(second)} documents: give one, or one for each"
        raise InvalidRequest(msg, param="queries")
    if len(first) < len(second):
        first *= len(second)
    return list(zip(first, second, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    listed = [given] if isinstance(given, str | Mapping) else list(given)
    if not listed:
        msg = f"{name} is empty: give at least one text"
        raise InvalidRequest(msg, param=name)
    return [_text(each, name) for each in listed]


def _text(given: Any, name: str) -> str:
    if isinstance(given, Mapping) and isinstance(text := given.get("prompt"), str):
        return text
    if not isinstance(given, str):
        msg = f"{name} must be texts, got {type(given).__name__}"
        raise InvalidRequest(msg, param=name)
    return given


# The LLM method for each kind of pooling; models with another kind return embeddings.
METHODS = {
    "none": "generate",
    "rank": "score",
    "classify": "classify",
    "token_classify": "encode",
    "splade": "encode",
}
Made = TypeVar("Made", bound="PoolingRequestOutput[Any]")
ManyPooling = PoolingParams | Sequence[PoolingParams] | None
ScoreInput = str | Mapping[str, Any]
# The values of encode(pooling_task=...) that a classifier accepts, for each LLM method.
# A model with one label, such as a reranker, labels single texts as well.
TASKS = {"classify": ("classify",), "score": ("classify",), "encode": ("token_classify",)}


class PoolingMethods(RequestMethods):
    """The methods of LLM that return vectors, labels or scores."""

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: ManyPooling = None,
        lora_request: OneAdapter | Sequence[OneAdapter | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
        task: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt by an embedding model; prompts: as in `generate`.

        pooling_params: dimensions and use_activation, for all prompts or in a list with one item
          for each prompt.
        lora_request, tokenization_kwargs: as in `generate`.
        prompt_name: a named prompt of the checkpoint, which is put before each text;
          None: the checkpoint's default prompt, if it has one.
        task: a task of the checkpoint, such as "retrieval.query", for models that have tasks
          (jina-embeddings v3 and v5).

        Raises:
            InvalidRequest: a prompt or the task is invalid, or the model generates text.
            RequestError, EngineDead: see `generate`.
        """
        self._check_kind("embed")
        adapter, prompt_name = select_task(task, prompt_name, tasks_of(self.config))
        before = named_prompt(self._tokenizer.prompts, prompt_name)
        batch = self._pooling(prompts, pooling_params, lora_request, tokenization_kwargs, before)
        batch.check_task("embed", dimensions=True)
        for own in batch.params:
            check_dimensions(own.dimensions, self._context)
        kinds = ["" if own.use_activation is not False else "plain" for own in batch.params]
        done = []
        for request, own, item in self._pooled(batch, use_tqdm, kinds, adapter):
            unit, values = own.use_activation is not False, floats_of(item.choices[0].vector)
            embedding = shortened(values, own.dimensions, unit=unit).tolist()
            done.append(_output(EmbeddingRequestOutput, request, item, EmbeddingOutput(embedding)))
        return done

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: ManyPooling = None,
        use_tqdm: UseTqdm = True,
        lora_request: OneAdapter | Sequence[OneAdapter | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_activation: bool | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the value of each label of a classifier for each prompt; prompts: as in `embed`.

        use_activation: False = the values are logits. True or None = they are results
          of the checkpoint's activation, such as probabilities. pooling_params may set it as well.

        Raises:
            InvalidRequest: a prompt is invalid, or the model is no classifier.
            RequestError, EngineDead: see `generate`.
        """
        if self.config.pooling != "rank":
            self._check_kind("classify")
        batch = self._pooling(prompts, pooling_params, lora_request, tokenization_kwargs)
        batch.check_task("classify")
        labels, done = self._context.labels, []
        kinds = [self._labels_kind(own.activates(use_activation)) for own in batch.params]
        for request, own, item in self._pooled(batch, use_tqdm, kinds):
            kind = self._context.class_activation if own.activates(use_activation) else "none"
            probs = activated(floats_of(item.choices[0].vector), kind)
            found = ClassificationOutput(probs, labels)
            done.append(_output(ClassificationRequestOutput, request, item, found))
        return done

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: ManyPooling = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: OneAdapter | Sequence[OneAdapter | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_activation: bool | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vectors or labels of each prompt or of its tokens; prompts: as in `embed`.

        pooling_task: "embed", "token_embed", "classify" or "token_classify"; None = the labels
          of a classifier, or the vectors of all tokens. BGE-M3 returns the weights of tokens
          for "token_classify", the embedding and then these weights for "embed&token_classify",
          and a dict with the result of each task for "embed&token_embed&token_classify".
        use_activation: False = logits, or vectors that are not scaled to length 1.
          pooling_params may set it as well, and dimensions for the task "embed".

        Raises:
            InvalidRequest: a prompt is invalid, or the model does not have this task.
            RequestError, EngineDead: see `generate`.
        """
        embeds = bool(embedding_tasks(self._context))
        before = named_prompt(self._tokenizer.prompts, None) if embeds else ""
        batch = self._pooling(prompts, pooling_params, lora_request, tokenization_kwargs, before)
        task = self._task(pooling_task or batch.task)
        batch.check_task(task, dimensions=task == "embed" and self._context.embeds)
        kinds = [self._labels_kind(own.activates(use_activation)) for own in batch.params]
        for place, own in enumerate(batch.params):
            check_dimensions(own.dimensions, self._context)
            if embeds:
                activates = own.activates(use_activation)
                kinds[place] = vectors_of(task, self._context, activates=activates)
        done = []
        for request, own, item in self._pooled(batch, use_tqdm, kinds):
            ids, values = request.prompt_token_ids, floats_of(item.choices[0].vector)
            activates = own.activates(use_activation)
            if own.dimensions is not None:
                values = shortened(values, own.dimensions, unit=activates)
            data: Any
            if embeds:
                data = data_of(task, results_of(task, values, ids, self._context))
            else:
                kind = self._context.class_activation if activates else "none"
                data = labels_of_task(task, values, len(ids), kind)
            done.append(_output(PoolingRequestOutput, request, item, PoolingOutput(_array(data))))
        return done

    def _labels_kind(self, activates: bool) -> str:
        """Return the kind of vectors for labels; the engine activates the scores of rerankers."""
        return "raw" if self.config.pooling == "rank" and not activates else ""

    def _task(self, asked: str | None) -> str:
        """Return the task of `encode`; InvalidRequest if the model does not have it."""
        method = self._method()
        possible = embedding_tasks(self._context) or TASKS.get(method, ())
        task = asked or ("token_embed" if "token_embed" in possible else "".join(possible))
        if task not in possible:
            known = " or ".join(possible) or f"none: call {method}()"
            msg = f"pooling_task {task or None} is not possible; for this model it is {known}"
            raise InvalidRequest(msg, param="pooling_task")
        return task

    def score(
        self,
        queries: ScoreInput | Sequence[ScoreInput],
        documents: ScoreInput | Sequence[ScoreInput],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: OneAdapter | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        instruction: str | None = None,
        use_activation: bool | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair: a reranker's, or the cosine of two embeddings.

        queries: one query for all documents, or one for each document.
        lora_request, tokenization_kwargs: as in `generate`; of the latter only those that truncate.
        chat_template: must be None, because the prompts of rerankers are known.
        instruction: the purpose of the score, for models that read one (Qwen3-Reranker).
        use_activation: False = a reranker's score before its activation, such as a logit;
          a cosine has no activation. pooling_params may set it as well.

        Raises:
            InvalidRequest: a pair is invalid, or the model generates text.
            RequestError, EngineDead: see `generate`.
        """
        embeds = self._method() == "embed"
        if not embeds:
            self._check_kind("score")
        if chat_template is not None:
            msg = "chat_template is not supported for scores: the prompt of the model is known"
            raise InvalidRequest(msg, param="chat_template")
        own = Pooling.of(pooling_params)
        batch = PoolingBatch([], [own])
        batch.check_task("embed" if embeds else "score", other=("classify", "score"))
        pairs = pairs_of(queries, documents)
        how = tokenization_of(tokenization_kwargs)
        if embeds:
            more = lora_request, tokenization_kwargs
            return self._similarities(pairs, instruction, use_tqdm, *more)
        if not how.special or how.lower:
            msg = "tokenization_kwargs of a pair of texts may only truncate"
            raise InvalidRequest(msg, param="tokenization_kwargs")
        cut = cut_of(self._context, _truncation(how, pairs))
        encode = self._context.get_pairs().encode
        requests = [
            self._request({"prompt_token_ids": encode(query, document, instruction, cut)})
            for query, document in pairs
        ]
        kind = "" if own.activates(use_activation) else "raw"
        adapters = self._adapters_of(lora_request, len(pairs))
        batch = PoolingBatch(requests, [own] * len(pairs), adapters)
        done = []
        for request, _, item in self._pooled(batch, use_tqdm, [kind] * len(pairs)):
            found = ScoringOutput(floats_of(item.choices[0].vector)[0])
            done.append(_output(ScoringRequestOutput, request, item, found))
        return done

    def _similarities(
        self,
        pairs: list[tuple[str, str]],
        instruction: str | None,
        use_tqdm: UseTqdm,
        lora_request: OneAdapter | None,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the embeddings of each pair, with the token ids of both texts."""
        if instruction is not None:
            raise InvalidRequest(NO_INSTRUCTION, param="instruction")
        texts, places = each_once(pairs)
        done = self.embed(
            texts,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [
            ScoringRequestOutput(
                done[a].request_id,
                ScoringOutput(cosine(done[a].outputs.embedding, done[b].outputs.embedding)),
                done[a].prompt_token_ids + done[b].prompt_token_ids,
            )
            for a, b in places
        ]

    def _pooling(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: ManyPooling,
        lora_request: OneAdapter | Sequence[OneAdapter | None] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        before: str = "",
    ) -> PoolingBatch:
        """Return the requests of prompts with their parameters; before: text before each prompt."""
        listed, how = as_list(prompts), tokenization_of(tokenization_kwargs)
        asked = pooling_params or PoolingParams()
        given = [Pooling.of(each) for each in one_each(asked, len(listed), "pooling_params")]
        adapters = self._adapters_of(lora_request, len(listed))
        cut = cut_of(self._context, _truncation(how))
        split = [without_media(prompt, f"prompts[{i}]") for i, prompt in enumerate(listed)]
        media = {i: (parts, own or {}) for i, (_, parts, own) in enumerate(split) if parts}
        if media and cut is not None:
            msg = "truncation is not possible with pictures: omit it"
            raise InvalidRequest(msg, param="tokenization_kwargs")
        requests = [
            self._media_request(prompt, parts, before, how, cut) for prompt, parts, _ in split
        ]
        return PoolingBatch(requests, given, adapters, media)

    def _pooled(
        self,
        batch: PoolingBatch,
        use_tqdm: UseTqdm,
        kinds: Sequence[str],
        adapter: str | None = None,
    ) -> Iterator[tuple[RequestOutput, Pooling, BatchItem]]:
        """Run requests that generate no tokens; yield each with its parameters and its item.

        kinds: the kind of vectors of each request, as in SamplingParams.
        adapter: the adapter of a task; None = the adapter of the default task, if any.
        """
        usual = adapter or default_task(tasks_of(self.config))
        params = [
            SamplingParams(
                max_tokens=0,
                vectors=kind,
                adapter=usual if given is None else name_of(given),
                skip_reading_prefix_cache=own.skip_cache or None,
            )
            for own, kind, given in zip(batch.params, kinds, batch.adapters, strict=True)
        ]
        items = items_of(batch.requests, params, [0] * len(params))
        for index, (parts, settings) in batch.media.items():
            request, item = batch.requests[index], items[index]
            items[index] = self._with_media(request, parts, settings, item)
        self._run(items, use_tqdm, self._context)
        yield from zip(batch.requests, batch.params, items, strict=True)

    def _method(self) -> str:
        """Return the name of the LLM method that fits the model."""
        return METHODS.get(self.config.pooling, "embed")

    def _check_kind(self, wanted: str) -> None:
        """Raise InvalidRequest unless `wanted` is the LLM method that fits the model."""
        method = self._method()
        if method == wanted:
            return
        does = {
            "generate": "generates text",
            "embed": "gives embeddings: call embed()",
            "score": "gives scores of pairs of texts: call score()",
            "classify": "gives labels of texts: call classify()",
            "encode": "gives labels of tokens: call encode()",
        }[method]
        if self.config.pooling == "splade":
            does = "makes sparse embeddings: call encode()"
        msg = f"{self.config.model} {does}. The option `pooling` decides which"
        raise InvalidRequest(msg, param="model")


def items_of(
    requests: list[RequestOutput], params: list[SamplingParams], priorities: list[int]
) -> list[BatchItem]:
    """Return the batch item of each request, with its parameters and priority."""
    return [
        BatchItem.of(request.prompt_token_ids, own, priority)
        for request, own, priority in zip(requests, params, priorities, strict=True)
    ]


def _output(
    kind: Callable[..., Made], request: RequestOutput, item: BatchItem, found: object
) -> Made:
    """Return the result of a request, made by the class `kind`."""
    return kind(
        request.request_id,
        found,
        request.prompt_token_ids,
        num_cached_tokens=item.cached_tokens,
        prompt=request.prompt,
    )


def _array(data: Any) -> Float32 | dict[str, Float32]:
    if isinstance(data, dict):
        return {name: np.asarray(rows, np.float32) for name, rows in data.items()}
    return np.asarray(data, np.float32)


def _truncation(how: Tokenization, pairs: Sequence[tuple[str, str]] | None = None) -> GenerateCall:
    """Return a call of a request that generates nothing, with the truncation of `how`."""
    return GenerateCall(
        truncate_prompt_tokens=how.truncate, truncation_side=how.side, embed=True, pairs=pairs
    )
