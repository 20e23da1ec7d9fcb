"""The kinds of media that models read besides text: one row of KINDS for each.

A kind has a module with two functions, which is imported when it is needed:

    rules(options, most_tokens) -> KindRules        what the options of the server say
    open_reader(path, mmproj, rules) -> KindReader  None = the model reads no such items

A tower of its own encodes the items in the engine (MediaTower in runtime/executor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions

Charge = Callable[[int], object]  # adds work to that of the caller, in bytes


@dataclass(frozen=True, slots=True)
class KindRules:
    """The options of the server about one kind.

    most: the most items of a request. settings: settings of the preprocessing, for all items.
    """

    most: int = 64
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MarkerTexts:
    """The texts of a model for an item of a kind in prompts.

    marker: the text of the token that templates write for an item.
    placeholder: the text of the token for a row of the tower; it may be the marker.
    gap: the text before and after each marker that templates do not write.
    before, after: the texts that templates write before and after the marker.
    written: the text, which may be no token, that templates write instead of the marker.
    """

    marker: str
    placeholder: str
    gap: str = ""
    before: str = ""
    after: str = ""
    written: str | None = None


class PartOfMessage(Protocol):
    """What readers need to know of a MediaPart besides its bytes."""

    @property
    def kind(self) -> str:
        """The kind of the part, such as "file"."""

    @property
    def detail(self) -> str | None:
        """The resolution that the client asks for."""


class SeenItem(Protocol):
    """What became of an item of a request, for the client."""

    kind: ClassVar[str]

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt it has."""

    @property
    def scaled(self) -> tuple[int, int, int, int] | None:
        """(width, height) before and after scaling, if much detail was lost; else None."""


class ItemLayout(Protocol):
    """How an item is shown to the tower and in the prompt; members as of MediaItem."""

    @property
    def text(self) -> str:
        """The text in place of the marker; each placeholder in it stands for one row."""

    @property
    def work(self) -> int:
        """How much the tower has to compute."""

    @property
    def parts(self) -> int:
        """Of how many parts a client hears that they were read."""

    @property
    def form(self) -> bytes:
        """What the payload is, for the tower."""

    def seen(self, tokens: int) -> SeenItem:
        """Return what a client hears of the item, which has this many tokens."""


class PartReader(Protocol):
    """Reads the items in a part of a message. Threads for decoding call the methods with bytes."""

    def key(self, data: bytes) -> bytes:
        """Return what the items depend on: a digest of the bytes, and all parameters."""

    def read(
        self, data: bytes, layouts: Sequence[ItemLayout] | None, *, measures: bool, charge: Charge
    ) -> tuple[Sequence[ItemLayout], bytes | None]:
        """Return the layouts of the items, and the payload if there is one item and it was made.

        layouts: the layouts, if bytes with the same key were read before; budgets still count them.
        measures: find only the layouts.

        Raises InvalidRequest, with a message without a subject, if the bytes are refused.
        """

    def payload(self, data: bytes, index: int, charge: Charge) -> bytes:
        """Return the payload of one of the items. Raises InvalidRequest as `read` does."""


class ItemsOfRequest(Protocol):
    """Reads the items of one request, within its budgets."""

    def of_part(self, part: PartOfMessage) -> PartReader:
        """Return the reader of a part; InvalidRequest: its parameters are not possible."""


class KindReader(Protocol):
    """Reads the items of a kind for one model."""

    @property
    def texts(self) -> MarkerTexts:
        """The texts of an item in prompts."""

    def of_request(self, settings: Mapping[str, Any], count: int) -> ItemsOfRequest:
        """Return the reader of a request.

        settings: settings of the preprocessing that the request has.
        count: the number of parts with items.

        Raises InvalidRequest if a setting is not possible.
        """


@dataclass(frozen=True, slots=True)
class MediaKind:
    """A kind of media items (core/media.py).

    noun: an item in texts for users. parts: the kinds of message parts that have such items.
    module: the module with `rules` and `open_reader`.
    """

    noun: str
    parts: tuple[str, ...]
    module: str

    def rules(self, options: ServerOptions, most_tokens: int) -> KindRules:
        """Return the rules that options set; most_tokens: EngineConfig.media_tokens."""
        rules: KindRules = import_module(self.module).rules(options, most_tokens)
        return rules

    def open_reader(self, path: str, mmproj: str | None, rules: KindRules) -> KindReader | None:
        """Return the reader of a model; None, perhaps with a warning, if it reads no such items.

        path, mmproj: the files of the model (EngineConfig.model_path and mmproj).

        Raises:
          ConfigError: the model cannot follow a setting of the server.
          ModelError: its files say too little about such items.
        """
        reader: KindReader | None = import_module(self.module).open_reader(path, mmproj, rules)
        return reader


KINDS: dict[str, MediaKind] = {
    "image": MediaKind("picture", ("image", "file"), "cpuserve.media.readers.pictures"),
}


def part_kinds() -> frozenset[str]:
    """Return the kinds of message parts that a model may read, whatever it is."""
    return frozenset(part for kind in KINDS.values() for part in kind.parts)
