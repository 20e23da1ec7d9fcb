"""POST /generate and /generate_stream, and the endpoint of `POST /` for models that generate.

TgiWriter writes generation events in the format of TGI, as events of a stream or as one JSON body.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.logprobs import TokenNames, finite
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.stream import StreamFormat
from cpuserve.api.route import generate, post
from cpuserve.api.tgi.errors import TGI, tgi_error
from cpuserve.api.tgi.schema import (
    TgiBestOf,
    TgiDetails,
    TgiEvent,
    TgiGenerated,
    TgiGenerateRequest,
    TgiPrefillToken,
    TgiRequest,
    TgiSequence,
    TgiStreamDetails,
    TgiToken,
    tgi_call,
    words,
)
from cpuserve.serving.calls.events import Choice, Event, Finish, Text

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation

router = APIRouter()
_post = partial(
    post,
    router,
    dialect=TGI,
    id_prefix="generate-",
    poolings=("none",),
)


@_post("/generate", schema=TgiGenerateRequest, response=TgiGenerated, words=words)
async def tgi_generate(request: RequestContext, body: TgiGenerateRequest) -> Response:
    """Continue a prompt."""
    return await _generated(request, body, TgiWriter, stream=False)


@_post("/generate_stream", schema=TgiGenerateRequest, response=None, stream=EVENTS, words=words)
async def tgi_stream(request: RequestContext, body: TgiGenerateRequest) -> Response:
    """Continue a prompt, as a stream with an event for each token."""
    return await _generated(request, body, TgiWriter, stream=True)


@_post(schema=TgiRequest, response=list[TgiGenerated], stream=EVENTS, words=words)
async def tgi_inference(request: RequestContext, body: TgiRequest) -> Response:
    """Continue a prompt, as a list with one text or as a stream."""
    return await _generated(request, body, TgiListWriter, stream=bool(body.stream))


async def _generated(
    request: RequestContext,
    body: TgiGenerateRequest,
    writer: type[TgiWriter],
    *,
    stream: bool,
) -> Response:
    return await generate(
        request, body, lambda body: tgi_call(body, request.context, stream=stream), writer
    )


def _reason(finish: str | None, stop: str | int | None) -> str:
    if finish == "length":
        return "length"
    return "stop_sequence" if isinstance(stop, str) else "eos_token"


class TgiWriter:
    """Writes the response of /generate or /generate_stream."""

    form = StreamFormat()

    def __init__(
        self, request: RequestContext, body: TgiGenerateRequest, generation: Generation
    ) -> None:
        self._fields = body.parameters
        self._before = body.inputs if body.parameters.return_full_text else ""
        self._num_prompt = len(generation.sequences[0].prompt.ids)
        tokenizer = request.context.get_tokenizer()
        self._special = tokenizer.special_ids
        self._names = TokenNames(tokenizer, as_ids=False, skip_special_tokens=False)
        self._text: list[str] = []
        self._count = 0

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        return msgspec.json.encode(self._generated(response))

    def _generated(self, response: WholeResponse) -> TgiGenerated:
        best = response.choices[0]
        text = self._before + "".join(best.text)
        if not self._fields.details:
            return TgiGenerated(text)
        others = [self._other(choice) for choice in response.left_out]
        details = self._sequence(best)
        fields = msgspec.structs.asdict(details)
        return TgiGenerated(text, TgiDetails(**fields, best_of_sequences=others or None))

    def _other(self, choice: Choice) -> TgiBestOf:
        fields = msgspec.structs.asdict(self._sequence(choice))
        return TgiBestOf(**fields, generated_text=self._before + "".join(choice.text))

    def _sequence(self, choice: Choice) -> TgiSequence:
        top = self._fields.top_n_tokens
        return TgiSequence(
            finish_reason=_reason(choice.reason, choice.stop_reason),
            generated_tokens=len(choice.token_ids),
            prefill=self._prefill(choice),
            tokens=[self._token(entry.token, entry.logprob) for entry in choice.logprobs],
            seed=self._fields.seed,
            top_tokens=[self._top(entry) for entry in choice.logprobs] if top else None,
        )

    def _prefill(self, choice: Choice) -> list[TgiPrefillToken]:
        """Return the tokens of the prompt, if the request asks for their logprobs."""
        if not self._fields.decoder_input_details:
            return []
        rows = choice.scores or [None] * len(choice.prompt.ids)
        return [
            TgiPrefillToken(
                token, self._names.name(token), None if row is None else finite(row.logprob)
            )
            for token, row in zip(choice.prompt.ids, rows, strict=True)
        ]

    def _top(self, entry: TokenLogprob) -> list[TgiToken]:
        return [self._token(*each) for each in entry.top[: self._fields.top_n_tokens]]

    def _token(self, token: int, logprob: float, text: str | None = None) -> TgiToken:
        shown = self._names.name(token) if text is None else text
        return TgiToken(token, shown, finite(logprob), token in self._special)

    def frames(self, events: list[Event]) -> bytes:
        """Return an event for each new token; b"" if there is none."""
        text, finish = None, None
        for event in events:
            if isinstance(event, Text):
                text = event
            elif isinstance(event, Finish):
                finish = event
        if text is None:
            return b""
        self._text.append(text.text)
        shown = [*(text.logprobs or ())]
        # The texts of the events make up the whole text. If several tokens come at once,
        # or if a text was held back, the last token has all of it.
        out = [self._event(entry, "", None) for entry in shown[:-1]]
        if shown or text.text or finish is not None:
            out.append(self._event(shown[-1] if shown else None, text.text, finish))
        return b"".join(b"data:" + msgspec.json.encode(event) + b"\n\n" for event in out)

    def _event(self, entry: TokenLogprob | None, text: str, finish: Finish | None) -> TgiEvent:
        """Return the event of a token; entry: None = only the end of a text that was held back."""
        self._count += entry is not None
        token = TgiToken(0, text, 0.0, True)
        if entry is not None:
            token = self._token(entry.token, entry.logprob, text)
        event = TgiEvent(self._count, token, None, None)
        if self._fields.top_n_tokens and entry is not None:
            event.top_tokens = self._top(entry)
        if finish is not None:
            event.generated_text = self._before + "".join(self._text)
            if self._fields.details:
                reason = _reason(finish.reason, finish.stop_reason)
                seed = self._fields.seed
                event.details = TgiStreamDetails(reason, self._count, seed, self._num_prompt)
        return event

    def failed(self, error: BaseException) -> bytes:
        """Return the event for an error after the stream has begun."""
        return b"data:" + tgi_error(error) + b"\n\n"


class TgiListWriter(TgiWriter):
    """Writes the response of `POST /`, which is a list with one text if it is no stream."""

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        return msgspec.json.encode([self._generated(response)])
