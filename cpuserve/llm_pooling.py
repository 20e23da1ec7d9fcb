"""The methods of LLM for models that generate no text: embeddings, labels and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.llm_arguments import PromptInput, as_list
from cpuserve.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.batch import BatchItem
from cpuserve.serving.classes import activated
from cpuserve.serving.events import floats_of
from cpuserve.serving.pooling_tasks import (
    data_of,
    embedding_tasks,
    labels_of_task,
    results_of,
    vectors_of,
)
from cpuserve.serving.similarity import cosine, each_once
from cpuserve.serving.tasks import default_task, select_task, tasks_of
from cpuserve.tokenizer.pairs import NO_INSTRUCTION
from cpuserve.tokenizer.tokenizer import named_prompt

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.inline import InlineClient
    from cpuserve.serving.context import ModelContext
    from cpuserve.serving.events import Choice
    from cpuserve.tokenizer.tokenizer import Tokenizer

# The LLM method for each kind of pooling; models with another kind return embeddings.
METHODS = {
    "none": "generate",
    "rank": "score",
    "classify": "classify",
    "token_classify": "encode",
    "splade": "encode",
}
# The values of encode(pooling_task=...) that a classifier accepts, for each LLM method.
TASKS = {"classify": ("classify",), "encode": ("token_classify",)}


class PoolingMethods:
    """The methods of LLM that return vectors, labels or scores."""

    config: EngineConfig
    _client: InlineClient
    _context: ModelContext
    _tokenizer: Tokenizer

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        prompt_name: str | None = None,
        task: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt by an embedding model; prompts: as in `generate`.

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
        requests = [self._request(prompt, before) for prompt in as_list(prompts)]
        return [
            EmbeddingRequestOutput(
                request.request_id,
                request.prompt,
                request.prompt_token_ids,
                EmbeddingOutput(floats_of(item.choices[0].vector).tolist()),
                num_cached_tokens=item.cached_tokens,
            )
            for request, item in zip(
                requests, self._vectors(requests, use_tqdm, adapter=adapter), strict=True
            )
        ]

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[ClassificationRequestOutput]:
        """Return the value of each label of a classifier for each prompt; prompts: as in `embed`.

        use_activation: False = the values are logits.
          True = they are results of the checkpoint's activation, such as probabilities.

        Raises:
            InvalidRequest: a prompt is invalid, or the model is no classifier.
            RequestError, EngineDead: see `generate`.
        """
        self._check_kind("classify")
        kind = self._context.class_activation if use_activation else "none"
        labels = self._context.labels
        requests = [self._request(prompt) for prompt in as_list(prompts)]
        return [
            ClassificationRequestOutput(
                request.request_id,
                request.prompt,
                request.prompt_token_ids,
                ClassificationOutput(activated(floats_of(item.choices[0].vector), kind), labels),
                num_cached_tokens=item.cached_tokens,
            )
            for request, item in zip(requests, self._vectors(requests, use_tqdm), strict=True)
        ]

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_task: str | None = None,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Return the vectors or labels of each prompt or of its tokens; prompts: as in `embed`.

        pooling_task: "embed", "token_embed", "classify" or "token_classify"; None = the labels
          of a classifier, or the vectors of all tokens. BGE-M3 returns the weights of tokens
          for "token_classify", the embedding and then these weights for "embed&token_classify",
          and a dict with the result of each task for "embed&token_embed&token_classify".
        use_activation: False = logits, or vectors that are not scaled to length 1.

        Raises:
            InvalidRequest: a prompt is invalid, or the model does not have this task.
            RequestError, EngineDead: see `generate`.
        """
        method = self._method()
        embeds = bool(tasks := embedding_tasks(self._context))
        possible = tasks or TASKS.get(method, ())
        task = pooling_task or ("token_embed" if "token_embed" in possible else "".join(possible))
        if task not in possible:
            known = " or ".join(possible) or f"none: call {method}()"
            msg = f"pooling_task {task or None} is not possible; for this model it is {known}"
            raise InvalidRequest(msg, param="pooling_task")
        kind = self._context.class_activation if use_activation else "none"
        wanted = vectors_of(task, self._context, activates=use_activation) if embeds else ""
        requests = [self._request(prompt) for prompt in as_list(prompts)]
        done = []
        for request, item in zip(requests, self._vectors(requests, use_tqdm, wanted), strict=True):
            ids, values = request.prompt_token_ids, floats_of(item.choices[0].vector)
            if embeds:
                data = data_of(task, results_of(task, values, ids, self._context))
            else:
                data = labels_of_task(task, values, len(ids), kind)
            done.append(
                PoolingRequestOutput(
                    request.request_id,
                    request.prompt,
                    ids,
                    PoolingOutput(data),
                    num_cached_tokens=item.cached_tokens,
                )
            )
        return done

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts: a reranker's, or the cosine of two embeddings.

        queries: one query for all documents, or a list with one query for each document.
        instruction: the purpose of the score, for models that read one (Qwen3-Reranker).
        use_activation: False = a reranker's score before its activation, such as a logit;
          a cosine has no activation.

        Raises:
            InvalidRequest: a pair is invalid, or the model generates text.
            RequestError, EngineDead: see `generate`.
        """
        embeds = self._method() == "embed"
        if not embeds:
            self._check_kind("score")
        first = [queries] if isinstance(queries, str) else list(queries)
        second = [documents] if isinstance(documents, str) else list(documents)
        if len(first) not in (1, len(second)):
            msg = f"{len(first)} queries for {len(second)} documents: give one, or one for each"
            raise InvalidRequest(msg, param="queries")
        if len(first) < len(second):
            first *= len(second)
        both = list(zip(first, second, strict=True))
        if embeds:
            return self._similarities(both, instruction, use_tqdm)
        pairs = self._context.get_pairs()
        requests = [
            self._request({"prompt_token_ids": pairs.encode(query, document, instruction)})
            for query, document in both
        ]
        return [
            ScoringRequestOutput(
                request.request_id,
                request.prompt_token_ids,
                ScoringOutput(floats_of(item.choices[0].vector)[0]),
                num_cached_tokens=item.cached_tokens,
            )
            for request, item in zip(
                requests,
                self._vectors(requests, use_tqdm, "" if use_activation else "raw"),
                strict=True,
            )
        ]

    def _similarities(
        self, pairs: list[tuple[str, str]], instruction: str | None, use_tqdm: bool
    ) -> list[ScoringRequestOutput]:
        """Return the cosine of the embeddings of each pair, with the token ids of both texts."""
        if instruction is not None:
            raise InvalidRequest(NO_INSTRUCTION, param="instruction")
        texts, places = each_once(pairs)
        done = self.embed(texts, use_tqdm=use_tqdm)
        return [
            ScoringRequestOutput(
                done[a].request_id,
                done[a].prompt_token_ids + done[b].prompt_token_ids,
                ScoringOutput(cosine(done[a].outputs.embedding, done[b].outputs.embedding)),
            )
            for a, b in places
        ]

    def _vectors(
        self,
        requests: list[RequestOutput],
        use_tqdm: bool,
        vectors: str = "",
        adapter: str | None = None,
    ) -> list[BatchItem]:
        """Run requests that generate no tokens; return items, each with a vector in its choice.

        vectors: as in SamplingParams.
        adapter: the name of a LoRA adapter; None = the adapter of the model's default task, if any.
        """
        adapter = adapter or default_task(tasks_of(self.config))
        own = SamplingParams(max_tokens=0, vectors=vectors, adapter=adapter)
        params = [own] * len(requests)
        items = items_of(requests, params, [0] * len(requests))
        self._run(items, use_tqdm, self._context)
        return items

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

    # --- methods that LLM implements ------------------------------------------------------------

    def _request(self, prompt: PromptInput, before: str = "") -> RequestOutput:
        """Return an empty RequestOutput for a prompt. before: the text to put before the prompt."""
        raise NotImplementedError

    def _run(
        self,
        items: list[BatchItem],
        use_tqdm: bool,
        context: ModelContext,
        keep: Callable[[int, Choice], None] | None = None,
    ) -> None:
        """Run all items until their sequences have ended."""
        raise NotImplementedError


def items_of(
    requests: list[RequestOutput], params: list[SamplingParams], priorities: list[int]
) -> list[BatchItem]:
    """Return the batch item of each request, with its parameters and priority."""
    return [
        BatchItem.of(request.prompt_token_ids, own, priority)
        for request, own, priority in zip(requests, params, priorities, strict=True)
    ]
