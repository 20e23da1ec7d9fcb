"""MediaReader: read the media of a conversation, and put their placeholders into the prompt."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, cast

from cpuserve.base.errors import InvalidRequest, ModelError, RequestError
from cpuserve.base.log import get_logger
from cpuserve.core.media import MediaItem
from cpuserve.media.kinds import KINDS, KindReader, KindRules
from cpuserve.media.sources import SourceRules, read_source
from cpuserve.serving.media.cache import MediaCache
from cpuserve.serving.media.expansion import Expansion
from cpuserve.serving.threads import TurnThreads
from cpuserve.tokenizer.conversation import (
    ConversationMessage,
    MediaPart,
    is_data_url,
    join_texts,
)

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions
    from cpuserve.media.kinds import ItemLayout, ItemsOfRequest, PartReader, SeenItem
    from cpuserve.tokenizer.conversation import Kind
    from cpuserve.tokenizer.tokenizer import Tokenizer

# A single caller has half of the threads: 2 that decode, and 8 that fetch.
_MOST_WAITING = 4096
DECODING = TurnThreads(3, "cpuserve-media", _MOST_WAITING)
_FETCHING = TurnThreads(15, "cpuserve-fetch", _MOST_WAITING)
log = get_logger("media")


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The options of the server about media: those of each kind, and where bytes come from."""

    kinds: Mapping[str, KindRules] = field(default_factory=dict)
    sources: SourceRules = field(default_factory=SourceRules)

    @classmethod
    def of(cls, options: ServerOptions, most_tokens: int) -> MediaRules:
        """Return the rules that options set; most_tokens: EngineConfig.media_tokens."""
        return cls(
            {name: kind.rules(options, most_tokens) for name, kind in KINDS.items()},
            SourceRules(
                tuple(options.allowed_media_domains),
                options.allowed_local_media_path,
                timeout_s=options.image_fetch_timeout,
            ),
        )

    def of_kind(self, kind: str) -> KindRules:
        """Return the rules of a kind."""
        return self.kinds.get(kind) or KindRules()


@dataclass(frozen=True, slots=True)
class ReadItem:
    """An item of a request, and the source of its payload. ids: the tokens for its marker."""

    kind: str
    digest: bytes
    layout: ItemLayout
    ids: Sequence[int]
    payload: Callable[[], Awaitable[bytes]]

    @property
    def seen(self) -> SeenItem:
        """What became of the item, for the client."""
        return self.layout.seen(len(self.ids))


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """The bytes of one part, and the layouts of the items in it."""

    data: bytes
    key: bytes
    reader: PartReader
    layouts: Sequence[ItemLayout]


class MediaReader:
    """Reads the media items of requests for one model.

    part_kinds: the kind of items in each kind of parts that the model reads.
    """

    def __init__(
        self, readers: Mapping[str, KindReader], tokenizer: Tokenizer, rules: MediaRules
    ) -> None:
        """readers: by kind. Raises ModelError if the tokenizer lacks a marker."""
        self._readers = readers
        self._rules = rules
        self._expansions = {
            kind: Expansion(reader.texts, tokenizer) for kind, reader in readers.items()
        }
        self.part_kinds = {part: kind for kind in readers for part in KINDS[kind].parts}
        self._cache = MediaCache()

    @staticmethod
    def of(
        path: str, mmproj: str | None, tokenizer: Tokenizer, rules: MediaRules
    ) -> MediaReader | None:
        """Return the reader for a model; None, with a warning, if it can read no media.

        path, mmproj: the files of the model (EngineConfig.model_path and mmproj).

        Raises ConfigError if the model cannot follow a setting of the server.
        """
        readers: dict[str, KindReader] = {}
        for name, kind in KINDS.items():
            try:
                reader = kind.open_reader(path, mmproj, rules.of_kind(name))
                if reader is not None:
                    Expansion(reader.texts, tokenizer)
                    readers[name] = reader
            except ModelError as error:
                log.warning("%ss are refused: %s", kind.noun, error)
        return MediaReader(readers, tokenizer, rules) if readers else None

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of items that the model reads."""
        return self._readers.keys()

    def reads(self, part: object) -> TypeGuard[MediaPart]:
        """Whether a part of a message may have items for the model."""
        return isinstance(part, MediaPart) and not part.why and part.kind in self.part_kinds

    async def read(
        self,
        messages: list[ConversationMessage],
        own_parts: Collection[int],
        settings: Mapping[str, Any] | None,
        *,
        measures: bool,
        salt: str = "",
    ) -> tuple[list[ConversationMessage], list[ReadItem]]:
        """Return messages with one part for each item, and the items in order.

        own_parts: the indices of the user's own last turn. An item there that cannot be read is
          refused; elsewhere, a line of text takes its place, so that the conversation can go on.
        settings: settings of the preprocessing that the request has.
        measures: only find the layouts; damaged data is not noticed.
        salt: requests with different salts share no file, so that no time shows what others sent.

        Raises:
          InvalidRequest: an item is refused, or there are too many items.
        """
        readers = self._of_request(messages, settings or {})
        new_messages, items = list(messages), list[ReadItem]()
        for index, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, list) or not any(map(self.reads, content)):
                continue
            parts: list[Any] = []
            for part in content:
                if not self.reads(part):
                    parts.append(part)
                    continue
                kind = self.part_kinds[part.kind]
                try:
                    file = await self._file(part, readers[kind], salt, measures=measures)
                except InvalidRequest as error:
                    if index in own_parts:
                        raise
                    parts.append(_left_out(part, error))
                    continue
                part_kind = cast("Kind", KINDS[kind].parts[0])
                parts += [replace(part, kind=part_kind)] * len(file.layouts)
                items += self._of_file(kind, file, part)
                self._check_number(kind, sum(item.kind == kind for item in items))
            new_messages[index] = {**message, "content": join_texts(parts)}
        return new_messages, items

    # --- markers in prompts -------------------------------------------------------------------

    @property
    def marks(self) -> dict[str, tuple[str, ...]]:
        """The texts with which users write an item of each kind, the longest first."""
        return {kind: expansion.marks for kind, expansion in self._expansions.items()}

    def framed(self, kind: str) -> str:
        """The marker of an item with the texts that chat templates write around it."""
        return self._expansions[kind].framed

    def processed(self, text: str, parts: Sequence[MediaPart]) -> str:
        """Return a prompt that no template has written, with the text around each marker.

        parts: the parts with the items.

        Source: the processors of transformers, which read texts only.
        """
        return self.spaced(
            self.with_markers(text, (self.part_kinds.get(p.kind, "") for p in parts))
        )

    def processed_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the token ids of such a prompt, with those of the text around each marker."""
        for expansion in self._expansions.values():
            ids = expansion.spaced_ids(ids)
        return list(ids)

    def with_markers(self, text: str, kinds: Iterable[str]) -> str:
        """Return a rendered prompt with markers in place of other texts that templates write.

        kinds: the kind of each item.
        """
        counts = Counter(kinds)
        for kind, expansion in self._expansions.items():
            if counts[kind]:
                text = expansion.with_markers(text, counts[kind])
        return text

    def unmarked(self, text: str, items: Sequence[ReadItem]) -> set[str]:
        """Return the kinds of items without a marker in a rendered prompt."""
        kinds = {item.kind for item in items}
        return {kind for kind in kinds if not self._expansions[kind].is_marked(text)}

    def marked(self, text: str, marks: Mapping[str, str]) -> str:
        """Return a rendered prompt with the marker of a kind in place of each of its marks."""
        for kind, mark in marks.items():
            text = self._expansions[kind].marked(text, mark)
        return text

    def spaced(self, text: str) -> str:
        """Return a rendered prompt with the text that belongs around each marker."""
        for expansion in self._expansions.values():
            text = expansion.spaced(text)
        return text

    def count_markers(self, ids: Sequence[int]) -> int:
        """Return how many markers a prompt has."""
        return sum(ids.count(expansion.marker) for expansion in self._expansions.values())

    def expanded(
        self, ids: Sequence[int], items: Sequence[ReadItem], expanded_items: Sequence[MediaItem]
    ) -> tuple[list[int], list[MediaItem]] | None:
        """Return the tokens with placeholders in place of markers, and the items with places.

        expanded_items: the first items, if `ids` already has their placeholders.
        The result is None if the markers are not those of the other items.
        """
        markers = {expansion.marker: kind for kind, expansion in self._expansions.items()}
        num_expanded = max(
            (begin + count for item in expanded_items for begin, count in item.spans), default=0
        )
        places = [
            position for position in range(num_expanded, len(ids)) if ids[position] in markers
        ]
        new_items = items[len(expanded_items) :]
        if [markers[ids[place]] for place in places] != [item.kind for item in new_items]:
            return None
        tokens, placed = list(ids[:num_expanded]), list(expanded_items)
        for place, item in zip(places, new_items, strict=True):
            tokens += ids[num_expanded:place]
            spans = self._expansions[item.kind].spans(item.ids, len(tokens))
            layout = item.layout
            work = layout.work, layout.parts, layout.form
            placed.append(MediaItem(item.kind, item.digest, spans, *work))
            tokens += item.ids
            num_expanded = place + 1
        return [*tokens, *ids[num_expanded:]], placed

    # --- helpers of `read` --------------------------------------------------------------------

    def _of_request(
        self, messages: Sequence[ConversationMessage], settings: Mapping[str, Any]
    ) -> dict[str, ItemsOfRequest]:
        """Return the reader of each kind for a request. Raises InvalidRequest."""
        counts = Counter(self.part_kinds[part.kind] for part in self._parts(messages))
        readers: dict[str, ItemsOfRequest] = {}
        for kind in counts or self.kinds:
            readers[kind] = self._readers[kind].of_request(settings, counts[kind])
            self._check_number(kind, counts[kind])
        return readers

    def _parts(self, messages: Sequence[ConversationMessage]) -> Iterator[MediaPart]:
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                yield from filter(self.reads, content)

    def _check_number(self, kind: str, count: int) -> None:
        limit = self._rules.of_kind(kind).most
        if count > limit:
            msg = (
                f"messages have {count} {KINDS[kind].noun}s or more: at most {limit} are accepted "
                "in a request. Send fewer, or start the server with a larger --limit-mm-per-prompt"
            )
            raise InvalidRequest(msg, role="messages")

    async def _file(
        self, part: MediaPart, items: ItemsOfRequest, salt: str, *, measures: bool
    ) -> _ReadFile:
        """Return the bytes and the items of a part; errors begin with the place of the part."""
        sources = self._rules.sources
        try:
            reader = items.of_part(part)
            size = len(part.data) + len(part.url) + len(part.content)
            if part.url and not is_data_url(part.url) and ":" in part.url[:16]:
                data = await _fetched(part.url, sources)
            else:
                max_bytes = sources.most_bytes
                data = (await DECODING.run(size, lambda: _as_data(part).read(max_bytes))).data
            return await DECODING.run(
                len(data), lambda: self._decoded(data, salt, reader, measures=measures)
            )
        except RequestError as error:
            if error.message.startswith(part.where):
                raise
            error.message = f"{part.where} {error.message}"
            error.param = error.role = "messages"
            raise

    def _decoded(self, data: bytes, salt: str, reader: PartReader, *, measures: bool) -> _ReadFile:
        """Decode a file, unless its layouts are known; keep its payload for the engine."""
        key = hashlib.sha256(reader.key(data) + salt.encode("utf-8", "surrogatepass")).digest()
        known = self._cache.layouts(key)
        layouts, payload = reader.read(data, known, measures=measures, charge=DECODING.charge)
        if known is None and not measures:
            self._cache.keep_layouts(key, layouts)
            if payload is not None:
                self._cache.keep_payload(_digest(key, 0), payload)
        return _ReadFile(data, key, reader, layouts)

    def _of_file(self, kind: str, file: _ReadFile, part: MediaPart) -> Iterator[ReadItem]:
        for index, layout in enumerate(file.layouts):
            digest = _digest(file.key, index)

            async def payload(digest: bytes = digest, index: int = index) -> bytes:
                known = self._cache.payload(digest)
                if known is not None:
                    return known
                try:
                    size = len(file.data)
                    return await DECODING.run(size, lambda: self._payload(file, index, digest))
                except RequestError as error:
                    error.message = f"{part.where} {error.message}"
                    raise

            ids = self._expansions[kind].ids_of(layout.text)
            yield ReadItem(kind, digest, layout, ids, payload)

    def _payload(self, file: _ReadFile, index: int, digest: bytes) -> bytes:
        payload = file.reader.payload(file.data, index, DECODING.charge)
        self._cache.keep_payload(digest, payload)
        return payload


def payload_of(items: Sequence[ReadItem]) -> Callable[[int], Awaitable[bytes]]:
    """Return the function that sends the engine the payload of an item (EngineClient.generate)."""

    async def give(index: int) -> bytes:
        return await items[index].payload()

    return give


async def _fetched(url: str, sources: SourceRules) -> bytes:
    """Return the bytes at a URL; the time to fetch them begins when a thread does.

    Raises InvalidRequest also after that time: a resolver may take longer than sources.timeout_s.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def fetch() -> bytes:
        loop.call_soon_threadsafe(future.cancel)
        return read_source(url, sources)

    fetching = asyncio.ensure_future(_FETCHING.run(1, fetch))
    try:
        await asyncio.wait((future, fetching), return_when=asyncio.FIRST_COMPLETED)
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


def _left_out(part: MediaPart, error: InvalidRequest) -> str:
    reason = error.message.removeprefix(part.where).strip()
    return f"[{part.noun[:1].upper()}{part.noun[1:]} was left out: it {reason}.]"


def _digest(key: bytes, index: int) -> bytes:
    """Return the digest of an item of the file with this key."""
    return hashlib.sha256(key + index.to_bytes(4, "little")).digest()


def nouns_of(items: Sequence[ReadItem]) -> str:
    """Return the word for these items in texts for users, as a plural."""
    nouns = {f"{KINDS[item.kind].noun}s" for item in items}
    return nouns.pop() if len(nouns) == 1 else "media"


def refuse_markers(items: Sequence[ReadItem]) -> NoReturn:
    """Raise the error for a prompt with more or fewer markers than items."""
    nouns = nouns_of(items)
    msg = (
        f"messages have {len(items)} {nouns}, but the chat template writes another number of "
        f"markers: use another --chat-template, or put the {nouns} into messages of the user"
    )
    raise InvalidRequest(msg, role="messages")
