"""POST /predict: class labels of texts or of pairs of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from cpuserve.api.vectors.route import Made, Table
from cpuserve.api.vectors.tei.errors import CUT, TEI, EmptyInput
from cpuserve.api.vectors.tei.fields import TeiFields, check_inputs
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.events import Choice, WholeResponse
from cpuserve.serving.vectors.classes import activated

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext

table = Table(TEI, CUT)
router = table.router
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


@table.row("/predict", PredictRequest, Predictions, "predict-", "inputs", ("classify", "rank"))
def predict(body: PredictRequest, request: RequestContext) -> Made:
    """Return the class labels of each text or pair of texts."""
    context, parameters = request.context, body.parameters or PredictParameters()
    most, function = parameters.top_k, parameters.function_to_apply
    if most is not None and most < 1:
        msg = f"top_k must be at least 1, got {most}"
        raise InvalidRequest(msg, param="top_k")
    pairs, is_ranked = _sequences(body.inputs), context.pooling == "rank"
    if is_ranked:
        raw = body.raw_scores or function == "none"
        call = body.call(pairs=pairs, vectors="raw" if raw else "")
    else:
        call = body.call(pairs=pairs, classify="text")

    def labels_of(choice: Choice) -> list[Prediction]:
        values: list[float] = choice.values.tolist()
        if not is_ranked:
            kind = "none" if body.raw_scores else context.class_activation
            values = activated(values, function or kind)
        found = map(Prediction, values, context.labels or [_SCORE])
        return sorted(found, key=lambda prediction: -prediction.score)[:most]

    def value(response: WholeResponse) -> object:
        found = [labels_of(choice) for choice in response.choices]
        return found if body.several else found[0]

    return call, value


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
