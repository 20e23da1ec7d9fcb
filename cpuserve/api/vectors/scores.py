"""POST /rerank and /score: relevance scores for pairs of texts, as Jina, Cohere and vLLM do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.request.fields import with_refused
from cpuserve.api.vectors.cohere.embed import CohereMeta, CohereUnits, CohereVersion
from cpuserve.api.vectors.cohere.errors import COHERE
from cpuserve.api.vectors.route import Made, Table, vectors_call
from cpuserve.base.errors import InvalidRequest
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.vectors.similarity import pair_scores

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext


table = Table()
router = table.router
of_cohere = Table(COHERE, router=router)
# Embedding models score pairs by the cosine of their vectors.
_SCORING = {"rank", *EMBEDDINGS}


class Document(msgspec.Struct):
    """A document in an object with `text`."""

    text: str


class TextParts(msgspec.Struct):
    """A text in an object: `text`, or the parts in `content`, which vLLM has for pictures as well.

    Other fields of the object are ignored.
    """

    text: str | None = None
    content: list[dict[str, Any]] | None = None

    def joined(self, where: str) -> str:
        """Return the text. Raises InvalidRequest if there is none, or a part is no text."""
        if self.text is not None:
            return self.text
        if not self.content:
            msg = f"{where} is an object without text: send a text, or an object with text"
            raise InvalidRequest(msg, param=where.partition("[")[0])
        for index, part in enumerate(self.content):
            if not isinstance(part.get("text"), str):
                kind = str(part.get("type"))[:40]
                msg = f"{where}.content[{index}] has type {kind!r}, and only texts are scored"
                raise InvalidRequest(msg, param=where.partition("[")[0])
        return "\n".join(part["text"] for part in self.content)


Texts = str | TextParts | list[str | TextParts]
# Pairs of fields that may contain the two sides of text pairs at /score; vLLM accepts all of them.
SCORED = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


class ScoringRequest(msgspec.Struct, kw_only=True):
    """The request fields that /rerank and /score share. Only some models use `instruction`.

    use_activation: false = return the scores of a reranker before its activation.
    """

    model: str | None = None
    instruction: str | None = None
    use_activation: bool | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


@with_refused("rerank")
class RerankRequest(ScoringRequest, kw_only=True):
    """The body of POST /rerank: documents to rank by their relevance for the query.

    top_k, truncation: fields of Voyage, which mean top_n and whether long pairs are cut.
    input, top_k, return_input: fields of mixedbread for documents, top_n and return_documents.
    raw_scores: return the scores before the activation (Infinity).
    """

    query: str | TextParts
    documents: Texts | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    input: Texts | None = None
    top_k: int | None | msgspec.UnsetType = msgspec.UNSET
    return_input: bool | None = None
    truncation: bool | None | msgspec.UnsetType = msgspec.UNSET
    raw_scores: bool | None = None

    @property
    def form(self) -> str:
        """Whose response the client reads: "mixedbread", "voyage", or "" for the others."""
        if self.documents is None and self.input is not None:
            return "mixedbread"
        # The client of Voyage always sends its fields, if only as null.
        unset = self.top_k is msgspec.UNSET and self.truncation is msgspec.UNSET
        return "" if unset else "voyage"

    @property
    def most(self) -> int | None:
        """The largest number of documents in the response; None or 0 = all."""
        return self.top_k or None if self.top_n is None else self.top_n

    @property
    def texts(self) -> list[str]:
        """The documents; InvalidRequest if there are none or too many."""
        name = "input" if self.documents is None and self.input is not None else "documents"
        given = getattr(self, name)
        if given is None:
            msg = "documents is missing"
            raise InvalidRequest(msg, param="documents", code="missing_required_parameter")
        return texts_of(given, name)

    @property
    def shows_texts(self) -> bool:
        """Whether the response has the documents; the default depends on the form."""
        shows = self.return_documents if self.return_input is None else self.return_input
        return self.form == "" if shows is None else shows


@with_refused("rerank")
class ScoreRequest(ScoringRequest, kw_only=True):
    """The body of POST /score: one text and a list, or two lists of equal length to pair up.

    The texts are in one of the pairs of fields in SCORED.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The pair of fields that contains the texts, or the pair to mention in an error."""
        given = [pair for pair in SCORED if any(getattr(self, name) is not None for name in pair)]
        whole = [pair for pair in given if all(getattr(self, name) is not None for name in pair)]
        return (whole or given or SCORED)[0]


class ScoringUsage(msgspec.Struct):
    """The number of tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int


class RerankResult(msgspec.Struct, omit_defaults=True):
    """A document with its index in the request and its relevance score."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(msgspec.Struct):
    """The response of POST /rerank: the most relevant documents, best one first.

    meta: as in the API of Cohere; only at its path, /v2/rerank.
    """

    id: str
    model: str
    usage: ScoringUsage
    results: list[RerankResult]
    meta: CohereMeta | msgspec.UnsetType = msgspec.UNSET


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """A document in the form of Voyage."""

    index: int
    relevance_score: float
    document: str | None = None


class RankedInput(msgspec.Struct):
    """A document in the form of mixedbread."""

    index: int
    score: float
    object: str
    input: str | msgspec.UnsetType = msgspec.UNSET


class VoyageRanks(msgspec.Struct):
    """The response in the form of Voyage."""

    object: str
    data: list[RankedDocument]
    model: str
    usage: ScoringUsage


class MixedbreadRanks(msgspec.Struct):
    """The response in the form of mixedbread."""

    object: str
    data: list[RankedInput]
    model: str
    usage: ScoringUsage


class ScoreItem(msgspec.Struct):
    """The relevance score of one pair of texts."""

    index: int
    object: str
    score: float


class ScoreAnswer(msgspec.Struct):
    """The response of POST /score, with one score per pair in the order of the pairs."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: ScoringUsage


_PATHS = "/v1/rerank /v1/reranking /reranking"
# The response of /rerank in each of its forms.
_RANKS = (RerankAnswer, VoyageRanks, MixedbreadRanks)


def _words(body: RerankRequest) -> dict[str, str]:
    """Return the field of the texts in errors, and how to make the server cut them."""
    name = "input" if body.form == "mixedbread" else "documents"
    return {"prompt": name, **({"cut": ", or omit truncation"} if body.form == "voyage" else {})}


@of_cohere.row("/v2/rerank", RerankRequest, RerankAnswer, "rerank-", _words, _SCORING)
def cohere_rerank(body: RerankRequest, request: RequestContext) -> Made:
    """Rank documents by their relevance for a query, in the format of Cohere."""
    return _ranked(body, request, "cohere")


@table.row(_PATHS, RerankRequest, _RANKS, "rerank-", _words, _SCORING)
def rerank(body: RerankRequest, request: RequestContext) -> Made:
    """Rank documents by their relevance for a query."""
    return _ranked(body, request, body.form)


def _ranked(body: RerankRequest, request: RequestContext, form: str) -> Made:
    """Return the call and its writer. Documents with equal scores keep their order.

    form: the dialect of the response, as in RerankRequest.form, or "cohere".

    Raises:
      InvalidRequest: a field is out of range or not supported.
    """
    name = "top_k" if body.top_n is None else "top_n"
    if body.most is not None and body.most < 0:
        msg = f"{name} must be at least 0, got {body.most}; 0 returns all documents"
        raise InvalidRequest(msg, param=name)
    _check_forms(body)
    documents = body.texts
    (query,) = texts_of(body.query, "query")
    if not query:
        msg = "query is empty: give the text that the documents should answer"
        raise InvalidRequest(msg, param="query")
    call = _call(body, [(query, document) for document in documents])
    if body.truncation is True:
        call.truncate_prompt_tokens = -1
    if body.raw_scores:
        call.vectors = "raw"
    call, scores_of = pair_scores(request.context, call)

    def value(response: WholeResponse) -> RerankAnswer | VoyageRanks | MixedbreadRanks:
        ranked = sorted(enumerate(scores_of(response)), key=lambda item: -item[1])
        ranked = ranked[: body.most or None]
        shown = [documents[index] if body.shows_texts else None for index, _ in ranked]
        model, usage = request.served.name, _usage(response)
        if form == "voyage":
            data = [RankedDocument(*each, text) for each, text in zip(ranked, shown, strict=True)]
            return VoyageRanks("list", data, model, usage)
        if form == "mixedbread":
            items = [
                RankedInput(*each, "rank_result", msgspec.UNSET if text is None else text)
                for each, text in zip(ranked, shown, strict=True)
            ]
            return MixedbreadRanks("list", items, model, usage)
        results = [
            RerankResult(*each, None if text is None else Document(text))
            for each, text in zip(ranked, shown, strict=True)
        ]
        answer = RerankAnswer(request.id, model, usage, results)
        if form == "cohere":
            units = CohereUnits(usage.prompt_tokens, search_units=1)
            answer.meta = CohereMeta(CohereVersion("2"), units)
        return answer

    return call, value


# Pairs of fields that mean the same in two APIs.
_SAME = (
    ("documents", "input"),
    ("top_n", "top_k"),
    ("return_documents", "return_input"),
    ("truncate_prompt_tokens", "truncation"),
)


def _check_forms(request: RerankRequest) -> None:
    """Raise InvalidRequest if two fields say the same."""
    for first, second in _SAME:
        values = (getattr(request, first), getattr(request, second))
        if not any(value is None or value is msgspec.UNSET for value in values):
            msg = f"{first} and {second} mean the same: set one of them"
            raise InvalidRequest(msg, param=second)


def _score_words(body: ScoreRequest) -> dict[str, str]:
    """Return the field of the texts in errors."""
    return {"prompt": body.names[1]}


@table.row("/v1/score /score", ScoreRequest, ScoreAnswer, "score-", _score_words, _SCORING)
def score(body: ScoreRequest, request: RequestContext) -> Made:
    """Return the relevance score of each pair of texts."""
    names = body.names
    _check_names(body, names)
    first, second = (texts_of(getattr(body, name), name) for name in names)
    if len(first) not in (1, len(second)):
        msg = (
            f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}: give one in "
            f"{names[0]}, or as many as in {names[1]}"
        )
        raise InvalidRequest(msg, param=names[0])
    if len(first) < len(second):
        first *= len(second)
    pairs = list(zip(first, second, strict=True))
    call, scores_of = pair_scores(request.context, _call(body, pairs))

    def value(response: WholeResponse) -> ScoreAnswer:
        items = [ScoreItem(i, "score", found) for i, found in enumerate(scores_of(response))]
        model, usage = request.served.name, _usage(response)
        return ScoreAnswer(request.id, "list", request.created, model, items, usage)

    return call, value


def _check_names(request: ScoreRequest, names: tuple[str, str]) -> None:
    """Raise InvalidRequest unless the two fields `names`, and no others, contain texts."""
    for name in names:
        if getattr(request, name) is None:
            msg = f"{name} is missing"
            raise InvalidRequest(msg, param=name, code="missing_required_parameter")
    for name in (name for pair in SCORED for name in pair):
        if name not in names and getattr(request, name) is not None:
            msg = f"{name} is not possible with {names[0]} and {names[1]}: omit it"
            raise InvalidRequest(msg, param=name)


def texts_of(given: Texts, name: str) -> list[str]:
    """Return the texts of a field; InvalidRequest if it has no texts or too many."""
    listed = given if isinstance(given, list) else [given]
    if not 0 < len(listed) <= MAX_PROMPTS:
        most = f"give 1 to {MAX_PROMPTS} texts" if listed else "give at least one text"
        msg = f"{name} has {len(listed)} texts: {most}"
        raise InvalidRequest(msg, param=name)
    return [
        item.joined(f"{name}[{index}]" if isinstance(given, list) else name)
        if isinstance(item, TextParts)
        else item
        for index, item in enumerate(listed)
    ]


def _call(body: ScoringRequest, pairs: list[tuple[str, str]]) -> GenerateCall:
    raw = "raw" if body.use_activation is False else ""
    # top_k of a ranking is no sampling parameter.
    return vectors_call(body, pairs=pairs, top_k=None, vectors=raw)


def _usage(response: WholeResponse) -> ScoringUsage:
    return ScoringUsage(response.usage.prompt, response.usage.prompt)
