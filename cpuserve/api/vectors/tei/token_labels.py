"""Class labels of tokens, for clients of token-classification pipelines of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import post
from cpuserve.api.vectors.route import Made, answer
from cpuserve.api.vectors.tei.errors import CUT, TEI
from cpuserve.api.vectors.tei.fields import TeiFields, check_inputs
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.prompts.encode import encode_spans
from cpuserve.serving.vectors.classes import activated, rows_of

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.tokenizer.coder import TokenSpan

router = APIRouter()
_STRATEGIES = ("none", "simple")
# The label of tokens outside of entities; pipelines leave out these tokens by default.
_OUTSIDE = ["O"]


class TokenParameters(msgspec.Struct, kw_only=True):
    """The parameters of a pipeline that labels tokens.

    aggregation_strategy: "none" (the default) = one label per token;
      "simple" = consecutive tokens with the same label become one entity.
    ignore_labels: labels that are left out; None = ["O"].
    """

    aggregation_strategy: str | None = None
    ignore_labels: list[str] | None = None
    stride: int | None = None


class TokenLabelsRequest(msgspec.Struct, kw_only=True):
    """Texts with tokens to be labelled, in the format of Hugging Face clients."""

    inputs: str | list[str]
    parameters: TokenParameters | None = None
    model: str | None = None
    priority: int | None = None
    timeout: float | None = None

    @property
    def texts(self) -> list[str]:
        """The texts of the request as a list."""
        return [self.inputs] if isinstance(self.inputs, str) else self.inputs


class Entity(msgspec.Struct, omit_defaults=True, gc=False):
    """A token or an entity of a text, with its label and its character range [start, end).

    score: the probability of the label; for an entity, the mean over its tokens.
    index: the index of the token in the text, counted in tokens.
    """

    word: str
    score: float
    start: int
    end: int
    entity: str | None = None
    entity_group: str | None = None
    index: int | None = None


@post(
    router,
    schema=TokenLabelsRequest,
    response=(list[Entity], list[list[Entity]]),
    dialect=TEI,
    id_prefix="tokens-",
    words=lambda _: {"prompt": "inputs", **CUT},
    poolings=("token_classify",),
)
async def token_labels(request: RequestContext, body: TokenLabelsRequest) -> Response:
    """Return the labels of the tokens of each text."""
    await request.choose(body.model)
    _check(body)
    spans = await encode_spans(request.context, body.texts)

    def make(body: TokenLabelsRequest, request: RequestContext) -> Made:
        fields = TeiFields(
            model=body.model, truncate=False, priority=body.priority, timeout=body.timeout
        )
        ids: list[str | int | list[int]] = [[span.id for span in found] for found in spans]
        call = fields.call(prompt=ids, classify="tokens")
        return call, lambda response: _found(body, spans, response, request.context.labels)

    return await answer(request, body, make)


def _check(body: TokenLabelsRequest) -> None:
    check_inputs("inputs", body.inputs)
    parameters = body.parameters or TokenParameters()
    strategy = parameters.aggregation_strategy
    if strategy is not None and strategy not in _STRATEGIES:
        msg = f"aggregation_strategy must be one of {', '.join(_STRATEGIES)}, got {strategy[:40]!r}"
        raise InvalidRequest(msg, param="aggregation_strategy")
    if parameters.stride:
        msg = "stride is not supported, because texts are not split: omit it"
        raise InvalidRequest(msg, param="stride")


def _found(
    body: TokenLabelsRequest,
    spans: list[list[TokenSpan]],
    response: WholeResponse,
    labels: Sequence[str],
) -> list[Entity] | list[list[Entity]]:
    """Return the labelled tokens or the entities of each text."""
    parameters = body.parameters or TokenParameters()
    ignored = _OUTSIDE if parameters.ignore_labels is None else parameters.ignore_labels
    found = []
    for text, own, choice in zip(body.texts, spans, response.choices, strict=True):
        entities = _entities(own, rows_of(choice.values, len(own)), labels)
        if parameters.aggregation_strategy == "simple":
            entities = [_joined(text, group) for group in _groups(entities)]
        found.append([e for e in entities if (e.entity or e.entity_group) not in ignored])
    return found[0] if isinstance(body.inputs, str) else found


def _entities(
    spans: list[TokenSpan], rows: list[list[float]], labels: Sequence[str]
) -> list[Entity]:
    found = []
    for index, (span, row) in enumerate(zip(spans, rows, strict=True)):
        if not span.special:
            values = activated(row, "softmax")
            best = values.index(max(values))
            entity = Entity(span.name, values[best], span.start, span.stop, labels[best])
            entity.index = index
            found.append(entity)
    return found


def _groups(tokens: list[Entity]) -> Iterator[list[Entity]]:
    """Yield the tokens of each entity: consecutive tokens with one tag, up to the next B- label."""
    group: list[Entity] = []
    for token in tokens:
        begins, tag = _tag(token)
        if group and (begins or tag != _tag(group[-1])[1]):
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def _tag(token: Entity) -> tuple[bool, str]:
    """Return (whether the label begins an entity, its tag): (True, "PER") for "B-PER"."""
    label = token.entity or ""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _joined(text: str, group: list[Entity]) -> Entity:
    start, end = group[0].start, group[-1].end
    score = sum(token.score for token in group) / len(group)
    return Entity(text[start:end], score, start, end, entity_group=_tag(group[0])[1])
