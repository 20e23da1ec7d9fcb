"""The body and the response of POST /predict: class labels of texts or of pairs of texts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from cpuserve.api.vectors.tei.errors import EmptyInput
from cpuserve.api.vectors.tei.schema import TeiFields, check_inputs
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.classes import activated

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.calls.events import Choice, WholeResponse
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.models.context import ModelContext

# The label for the single output of a reranker.
_SCORE = "LABEL_0"
_NO_INPUT = "inputs must be a text, a pair of texts, or a list of lists with one or two texts each"


class PredictParameters(msgspec.Struct, kw_only=True):
    """Parameters of a transformers pipeline, which Hugging Face clients send.

    function_to_apply: how scores are computed from logits; None = the function of the model.
    top_k: the number of most likely labels that are returned; None = all.
    """

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: int | None = None


class PredictRequest(TeiFields, kw_only=True):
    """The body of POST /predict.

    inputs: a text, a pair of texts, or a list of lists of one or two texts.
    raw_scores: whether the scores are logits.
    parameters: sent by pipeline clients, which expect a list of labels for each input.
    """

    inputs: str | list[str | list[str]]
    raw_scores: bool | None = None
    parameters: PredictParameters | None = None

    @property
    def several(self) -> bool:
        """Whether the response has a list of labels for each input."""
        is_batch = not isinstance(self.inputs, str) and isinstance(self.inputs[0], list)
        return is_batch or self.parameters is not None


class Prediction(msgspec.Struct):
    """A class label and its score: a probability or a logit."""

    score: float
    label: str


# The response for several inputs has a list of labels per input; otherwise it is one list.
Predictions = (list[Prediction], list[list[Prediction]])


def predict_call(request: PredictRequest, context: ModelContext) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest if inputs are no texts or pairs, or too many."""
    parameters = request.parameters
    if parameters is not None and parameters.top_k is not None and parameters.top_k < 1:
        msg = f"top_k must be at least 1, got {parameters.top_k}"
        raise InvalidRequest(msg, param="top_k")
    pairs = _sequences(request.inputs)
    if context.pooling != "rank":
        return request.call(pairs=pairs, classify="text")
    raw = request.raw_scores or _function(request) == "none"
    return request.call(pairs=pairs, vectors="raw" if raw else "")


def _sequences(inputs: str | list[str | list[str]]) -> list[tuple[str, ...]]:
    check_inputs("inputs", inputs)
    found: list[tuple[str, ...]]
    if isinstance(inputs, str):
        found = [(inputs,)]
    elif isinstance(inputs[0], str):
        found = [tuple(text for text in inputs if isinstance(text, str))]
        if len(found[0]) < len(inputs):
            raise InvalidRequest(_NO_INPUT, param="inputs")
    else:
        found = [tuple(texts) for texts in inputs if isinstance(texts, list)]
        if len(found) < len(inputs):
            raise InvalidRequest(_NO_INPUT, param="inputs")
    if not all(1 <= len(texts) <= 2 for texts in found):
        raise InvalidRequest(_NO_INPUT, param="inputs")
    if not all(all(texts) for texts in found):
        msg = "inputs has an empty text: omit it"
        raise EmptyInput(msg, param="inputs")
    return found


def _function(request: PredictRequest) -> str | None:
    return None if request.parameters is None else request.parameters.function_to_apply


class PredictWriter:
    """Writes the response of /predict: the labels of each input, most likely label first."""

    def __init__(
        self, received: RequestContext, asked: PredictRequest, _generation: Generation
    ) -> None:
        self._context = received.context
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        found = [self._labels(choice) for choice in response.choices]
        return msgspec.json.encode(found if self._asked.several else found[0])

    def _labels(self, choice: Choice) -> list[Prediction]:
        parameters, context = self._asked.parameters, self._context
        values: list[float] = floats_of(choice.vector).tolist()
        if context.pooling != "rank":
            kind = "none" if self._asked.raw_scores else context.class_activation
            values = activated(values, _function(self._asked) or kind)
        labels = context.labels or [_SCORE]
        found = map(partial(Prediction), values, labels)
        ranked = sorted(found, key=lambda prediction: -prediction.score)
        return ranked[: None if parameters is None else parameters.top_k]
