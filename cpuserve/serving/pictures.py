"""Read the pictures of a conversation, and put their placeholders into the prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from cpuserve.base.errors import InvalidRequest, ModelError, RequestError
from cpuserve.base.log import get_logger
from cpuserve.config.engine import MEDIA_PAYLOAD_BYTES
from cpuserve.config.server import most_pictures
from cpuserve.core.media import MediaItem
from cpuserve.media.decoding.client import (
    DECODER,
    MAX_CPU_S,
    MAX_PIXELS,
    Pictures,
    PictureStopped,
    is_installed,
)
from cpuserve.media.decoding.formats import MOST_PIXELS, check_left
from cpuserve.media.decoding.wire import Decoded, DecodedFile
from cpuserve.media.families.settings import changed, configured, family_at, server_settings
from cpuserve.media.families.table import WRITTEN, AnyFamily, for_pictures, frame_of
from cpuserve.media.layout import ShownPicture
from cpuserve.media.sources import SourceRules, read_source
from cpuserve.program.pictures import KIND
from cpuserve.serving.threads import TurnThreads
from cpuserve.tokenizer.conversation import (
    ConversationMessage,
    Kind,
    MediaPart,
    is_data_url,
    join_texts,
)

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions
    from cpuserve.tokenizer.tokenizer import Tokenizer

# The kinds of parts that a model with a tower reads.
KINDS: frozenset[Kind] = frozenset(("image", "file"))
MOST_PICTURES = 64
# The most layouts of files that are kept.
_MOST_FILES = 4096
# A second of CPU costs so many pixels, whatever the header of a file says: a picture that reaches
# its limit costs as much as the largest one. Real pictures take half of that or less, besides the
# time of a small one.
_PIXELS_A_SECOND = MAX_PIXELS / MAX_CPU_S
_SMALL_S = 0.05
_PDF = "application/pdf"
# A single caller has half of the threads: 2 that decode, and 8 that fetch.
_MOST_WAITING = 4096
DECODING = TurnThreads(3, "cpuserve-pictures", _MOST_WAITING)
_FETCHING = TurnThreads(15, "cpuserve-fetch", _MOST_WAITING)
log = get_logger("pictures")


@dataclass(frozen=True, slots=True)
class PictureRules:
    """The options of the server about pictures.

    most: the most pictures of a request, pages of documents included.
    settings: settings of the preprocessing, for all pictures.
    """

    most: int = MOST_PICTURES
    sources: SourceRules = field(default_factory=SourceRules)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ServerOptions, most_tokens: int) -> PictureRules:
        """Return the rules that options set; most_tokens: EngineConfig.media_tokens."""
        return cls(
            most_pictures(options.limit_mm_per_prompt, MOST_PICTURES),
            SourceRules(
                tuple(options.allowed_media_domains),
                options.allowed_local_media_path,
                timeout_s=options.image_fetch_timeout,
            ),
            server_settings(options, most_tokens),
        )


@dataclass(frozen=True, slots=True)
class ReadPicture:
    """A picture of a request: its part that the engine gets, and the source of its patches.

    ids: the tokens in place of its marker.
    """

    digest: bytes
    shown: Decoded
    ids: Sequence[int]
    patches: Callable[[], Awaitable[bytes]]

    @property
    def seen(self) -> ShownPicture:
        """The sizes of the picture and its tokens, for the client."""
        shown, layout = self.shown, self.shown.layout
        sizes = shown.width, shown.height, layout.width, layout.height
        return ShownPicture(*sizes, len(self.ids))


@dataclass(slots=True)
class PixelBudget:
    """How many pixels the pictures of a request may still have.

    A picture takes its pixels from the budget before they are decoded, so a damaged one does too.
    One that takes long for its pixels takes more of them afterwards (_PIXELS_A_SECOND).
    """

    left: int

    def spend(self, pixels: int) -> None:
        """Take pixels from the budget, which never falls below 0."""
        self.keep(self.left - pixels)

    def keep(self, pixels: int) -> None:
        """Leave at most this number of pixels in the budget."""
        self.left = max(0, min(self.left, pixels))


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """The bytes of one part, and the pictures in it."""

    data: bytes
    key: bytes
    family: AnyFamily
    is_document: bool
    file: DecodedFile


class PictureReader:
    """Reads the pictures of requests for one model.

    marker: the id of the token that templates write for a picture.
    placeholder: the id of the token for a row of the tower.
    """

    def __init__(self, family: AnyFamily, tokenizer: Tokenizer, rules: PictureRules) -> None:
        """Raises ModelError if the tokenizer has no such marker."""
        self._family = family
        self._tokenizer = tokenizer
        self._rules = rules
        self.marker = _token(tokenizer, family.marker)
        self.placeholder = _token(tokenizer, family.placeholder)
        self._known: OrderedDict[bytes, DecodedFile] = OrderedDict()
        self._patches: OrderedDict[bytes, bytes] = OrderedDict()
        self._expansions: dict[str, list[int]] = {}

    @staticmethod
    def of(
        path: str, mmproj: str | None, tokenizer: Tokenizer, rules: PictureRules
    ) -> PictureReader | None:
        """Return the reader for a model; None, with a warning, if there can be none.

        path, mmproj: the files of the model (EngineConfig.model_path and mmproj).

        Raises ConfigError if the family cannot follow a setting of the server.
        """
        try:
            family = family_at(Path(path), mmproj)
            if family is None:
                return None
            if not is_installed():
                log.warning("pictures are refused: pip install 'cpuserve[images]' to read them")
                return None
            made = PictureReader(family, tokenizer, rules)
        except ModelError as error:
            log.warning("pictures are refused: %s", error)
            return None
        made._family = configured(family, rules.settings)
        return made

    async def read(
        self,
        messages: list[ConversationMessage],
        own: Collection[int],
        settings: Mapping[str, Any] | None,
        *,
        measures: bool,
        salt: str = "",
    ) -> tuple[list[ConversationMessage], list[ReadPicture]]:
        """Return messages with one image part for each picture, and the pictures in order.

        own: the indices of the user's own last turn. A picture there that cannot be read is
          refused; elsewhere, a line of text takes its place, so that the conversation can go on.
        settings: settings of the preprocessing that the request has.
        measures: only find the sizes; damaged pixels are not noticed.
        salt: requests with different salts share no file, so that no time shows what others sent.

        Raises:
          InvalidRequest: a picture is refused, or there are too many pictures.
        """
        family = changed(self._family, settings) if settings else self._family
        number = sum(1 for _ in _media(messages))
        _check_number(number, self._rules.most)
        family = for_pictures(family, number)
        found, pictures, budget = list(messages), list[ReadPicture](), PixelBudget(MOST_PIXELS)
        for index, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list) or not any(map(is_read, content)):
                continue
            parts: list[Any] = []
            for part in content:
                if not is_read(part):
                    parts.append(part)
                    continue
                try:
                    read = await self._file(part, family, budget, salt, measures=measures)
                except InvalidRequest as error:
                    if index in own:
                        raise
                    parts.append(_left_out(part, error))
                    continue
                parts += [replace(part, kind="image")] * len(read.file.pictures)
                pictures += self._of_file(read, part)
                _check_number(len(pictures), self._rules.most)
            found[index] = {**message, "content": join_texts(parts)}
        return found, pictures

    def processed(self, text: str, count: int) -> str:
        """Return a prompt that no template has written, with the text around each marker.

        count: the number of pictures.

        Source: the processors of transformers, which read texts only.
        """
        return self.spaced(self.found(text, count))

    def processed_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of such a prompt, with those of the text around each marker."""
        gap = self._tokenizer.encode(self._family.gap, add_special_tokens=False)
        pieces = ((*gap, token, *gap) if token == self.marker else (token,) for token in ids)
        return [token for piece in pieces for token in piece]

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts with which users write a picture, the longest first."""
        before, after = frame_of(self._family)
        marker = self._family.marker
        framed = () if before + after == "" else (f"{before}{marker}{after}",)
        written = WRITTEN.get(marker)
        return (*framed, marker, *(() if written is None else (written,)))

    @property
    def framed(self) -> str:
        """The marker of a picture with the texts that chat templates write around it."""
        before, after = frame_of(self._family)
        return f"{before}{self.spaced(self._family.marker)}{after}"

    def found(self, text: str, count: int) -> str:
        """Return a rendered prompt with a marker in place of each text of `WRITTEN`.

        count: the number of pictures. If the prompt has another number of these texts, a user may
          have written some, so it stays as it is.
        """
        written = WRITTEN.get(self._family.marker)
        if written is None or self.is_marked(text) or text.count(written) != count:
            return text
        return text.replace(written, self._family.marker)

    def is_marked(self, text: str) -> bool:
        """Whether a rendered prompt has the marker of a picture."""
        return self._family.marker in text

    def marked(self, text: str, mark: str) -> str:
        """Return a rendered prompt with the marker of a picture in place of each `mark`."""
        return text.replace(mark, self._family.marker)

    def spaced(self, text: str) -> str:
        """Return a rendered prompt with the text that belongs around each marker of a picture."""
        gap, marker = self._family.gap, self._family.marker
        return text.replace(marker, f"{gap}{marker}{gap}") if gap else text

    def expanded(
        self, ids: Sequence[int], pictures: Sequence[ReadPicture], earlier: Sequence[MediaItem]
    ) -> tuple[list[int], list[MediaItem]] | None:
        """Return the tokens with placeholders in place of markers, and the pictures with places.

        earlier: the first pictures, if `ids` already has their placeholders.
        The result is None if the number of markers is not the number of the other pictures.
        """
        done = max((begin + count for each in earlier for begin, count in each.spans), default=0)
        places = [at for at in range(done, len(ids)) if ids[at] == self.marker]
        rest = pictures[len(earlier) :]
        if len(places) != len(rest):
            return None
        found, shown = list(ids[:done]), list(earlier)
        for place, picture in zip(places, rest, strict=True):
            found += ids[done:place]
            form = picture.shown.layout.form
            shown.append(
                MediaItem(
                    KIND,
                    picture.digest,
                    _runs(picture.ids, self.placeholder, len(found)),
                    form.num_patches,
                    len(form.tiles),
                    form.packed(),
                )
            )
            found += picture.ids
            done = place + 1
        return [*found, *ids[done:]], shown

    async def _file(
        self, part: MediaPart, family: AnyFamily, budget: PixelBudget, salt: str, *, measures: bool
    ) -> _ReadFile:
        """Return the bytes and the pictures of a part; errors begin with the place of the part."""
        rules = self._rules
        try:
            if part.detail and part.detail != "auto":
                family = family.changed({"detail": part.detail})
            size = len(part.data) + len(part.url) + len(part.content)
            if part.url and not is_data_url(part.url) and ":" in part.url[:16]:
                data = await _fetched(part.url, rules.sources)
            else:
                most = rules.sources.most_bytes
                data = (await DECODING.run(size, lambda: _as_data(part).read(most))).data
            document = part.kind == "file"
            return await DECODING.run(
                len(data), lambda: self._decoded(data, salt, family, document, budget, measures)
            )
        except RequestError as error:
            if error.message.startswith(part.where):
                raise
            error.message = f"{part.where} {error.message}"
            error.param = error.role = "messages"
            raise

    def _decoded(
        self,
        data: bytes,
        salt: str,
        family: AnyFamily,
        document: bool,
        budget: PixelBudget,
        measures: bool,
    ) -> _ReadFile:
        """Decode a file, unless its layout is known; keep its patches for the engine."""
        key = _file_key(data, family, document, salt)
        is_document, left = document and b"%PDF-" in data[:1024], budget.left
        check_left(1, left)
        known = self._known.get(key)
        if known is None:
            # The pages of a document are drawn when the engine asks for them.
            measures_only = measures or is_document
            try:
                found = self._decode(data, family, document, measures_only, left, spent=budget)
            except PictureStopped:  # it took more time or memory than a large picture
                budget.keep(left - MAX_PIXELS)
                raise
            known = found.file
            if not measures:
                self._keep(key, found, is_document)
        check_left(known.pixels, left)
        budget.keep(left - known.pixels)
        return _ReadFile(data, key, family, is_document, known)

    def _decode(
        self,
        data: bytes,
        family: AnyFamily,
        document: bool,
        measures: bool,
        left: int = MOST_PIXELS,
        page: int = -1,
        spent: PixelBudget | None = None,
    ) -> Pictures:
        """Decode a file on a thread of DECODING; its pixels and time are work of the caller."""
        told = 0

        def opened(pixels: int) -> None:
            nonlocal told
            told = pixels
            DECODING.charge(max(0, pixels - len(data)))
            if spent is not None:
                spent.spend(pixels)

        def used(seconds: float) -> None:
            nonlocal told
            pixels = round(max(0.0, seconds - _SMALL_S) * _PIXELS_A_SECOND)
            DECODING.charge(max(0, pixels - max(told, len(data))))
            if spent is not None:
                spent.spend(max(0, pixels - told))
            told = 0  # another attempt counts its pixels again

        return DECODER.decode(
            data,
            family,
            document=document,
            most_pages=self._rules.most,
            measures=measures,
            left=left,
            page=page,
            opened=opened,
            used=used,
        )

    def _keep(self, key: bytes, found: Pictures, is_document: bool) -> None:
        self._known[key] = found.file
        while len(self._known) > _MOST_FILES:
            self._known.popitem(last=False)
        if not is_document:
            self._keep_patches(_page_key(key, 0), found.patches)

    def _keep_patches(self, key: bytes, patches: bytes) -> None:
        self._patches[key] = patches
        while (
            len(self._patches) > 1 and sum(map(len, self._patches.values())) > MEDIA_PAYLOAD_BYTES
        ):
            self._patches.popitem(last=False)

    def _of_file(self, read: _ReadFile, part: MediaPart) -> Iterator[ReadPicture]:
        for page, shown in enumerate(read.file.pictures):
            key = _page_key(read.key, page)

            async def patches(key: bytes = key, page: int = page) -> bytes:
                kept = self._patches.get(key)
                if kept is not None:
                    return kept
                try:
                    return await DECODING.run(len(read.data), lambda: self._drawn(read, page, key))
                except RequestError as error:
                    error.message = f"{part.where} {error.message}"
                    raise

            yield ReadPicture(key, shown, self._expansion(shown.layout.text), patches)

    def _drawn(self, read: _ReadFile, page: int, key: bytes) -> bytes:
        number = page if read.is_document else -1
        found = self._decode(read.data, read.family, read.is_document, False, page=number)
        self._keep_patches(key, found.patches)
        return found.patches

    def _expansion(self, text: str) -> list[int]:
        """Return the tokens of the text of a layout."""
        ids = self._expansions.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, unlocked=True)
            if len(self._expansions) > _MOST_FILES:
                self._expansions.clear()
            self._expansions[text] = ids
        return ids


def _token(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of the token with this text; ModelError if the text is not one token."""
    found = tokenizer.token_id(text)
    if found is None or not tokenizer.is_token(text):
        msg = f"the tokenizer has no token {text!r}"
        raise ModelError(msg)
    return found


def is_read(part: object) -> bool:
    """Return whether a part of a message may be a picture or a document for the model."""
    return isinstance(part, MediaPart) and not part.why and part.kind in KINDS


def patches_of(pictures: Sequence[ReadPicture]) -> Callable[[int], Awaitable[bytes]]:
    """Return the function that sends the engine the patches of a picture."""

    async def give(index: int) -> bytes:
        return await pictures[index].patches()

    return give


async def _fetched(url: str, sources: SourceRules) -> bytes:
    """Return the bytes at a URL; the time to fetch them begins when a thread does.

    Raises InvalidRequest also after that time: a resolver may take longer than sources.timeout_s.
    """
    loop = asyncio.get_running_loop()
    begun = loop.create_future()

    def fetch() -> bytes:
        loop.call_soon_threadsafe(begun.cancel)
        return read_source(url, sources)

    fetching = asyncio.ensure_future(_FETCHING.run(1, fetch))
    try:
        await asyncio.wait((begun, fetching), return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(fetching, sources.timeout_s + 0.25)
    except asyncio.TimeoutError:
        msg = f"was not fetched within {sources.timeout_s:g} s: send its bytes as a data: URL"
        raise InvalidRequest(msg) from None
    finally:
        fetching.cancel()


def _as_data(part: MediaPart) -> MediaPart:
    """Return a part with base64 in `data`; some clients send bare base64 as the URL."""
    if part.url and not part.data and not is_data_url(part.url):
        return replace(part, data=part.url, url="")
    return part


def _media(messages: Sequence[ConversationMessage]) -> Iterator[object]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from filter(is_read, content)


def _check_number(count: int, most: int) -> None:
    if count > most:
        msg = (
            f"messages have {count} pictures or more: at most {most} are accepted in a request. "
            "Send fewer, or start the server with a larger --limit-mm-per-prompt"
        )
        raise InvalidRequest(msg, role="messages")


def _left_out(part: MediaPart, error: InvalidRequest) -> str:
    why = error.message.removeprefix(part.where).strip()
    return f"[{part.noun[:1].upper()}{part.noun[1:]} was left out: it {why}.]"


def _file_key(data: bytes, family: AnyFamily, document: bool, salt: str) -> bytes:
    """Return the key of a file: the digests of its pictures, also in the engine, depend on it."""
    key = hashlib.sha256(data).digest() + msgspec.msgpack.encode((family, document))
    return hashlib.sha256(key + salt.encode("utf-8", "surrogatepass")).digest()


def _page_key(key: bytes, page: int) -> bytes:
    return hashlib.sha256(key + page.to_bytes(4, "little")).digest()


def _runs(ids: Sequence[int], placeholder: int, begin: int) -> list[tuple[int, int]]:
    """Return (position, length) of each run of placeholders; begin: the position of ids[0]."""
    found: list[tuple[int, int]] = []
    for at, token in enumerate(ids):
        if token != placeholder:
            continue
        if found and sum(found[-1]) == begin + at:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((begin + at, 1))
    return found


def refuse_markers(count: int) -> NoReturn:
    """Raise the error for a prompt with more or fewer markers than its `count` pictures."""
    msg = (
        f"messages have {count} pictures, but the chat template writes another number of markers: "
        "use another --chat-template, or put the pictures into messages of the user"
    )
    raise InvalidRequest(msg, role="messages")
