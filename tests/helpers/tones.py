"""A toy kind of media, "tone": a row of the table of kinds, a reader and a tower, and nothing else.

A tone is a text such as b"440,880": it has a row for each number, and the row is the number.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.kinds import KindRules, MarkerTexts, MediaKind

KIND = "tone"
ROW = MediaKind("tone", ("audio",), __name__)


def rules(options, most_tokens):
    return KindRules(most=2)


def open_reader(path, mmproj, rules):
    return Tones()


class Tones:
    texts = MarkerTexts("<global-img>", "<row_1_col_1>")  # tokens of the tiny model

    def of_request(self, settings, count):
        return self

    def of_part(self, part):
        return self

    def key(self, data):
        return b"tone" + hashlib.sha256(data).digest()

    def read(self, data, known, *, measures, charge):
        if not all(number.isdigit() for number in data.split(b",")):
            msg = "is no tone: send numbers with commas"
            raise InvalidRequest(msg)
        return known or [ToneLayout(data.count(b",") + 1)], None

    def payload(self, data, index, charge):
        return data


@dataclass(frozen=True)
class ToneLayout:
    count: int
    parts = 1
    form = b"in Hz"

    @property
    def work(self):
        return self.count

    @property
    def text(self):
        return "<row_1_col_1>" * self.count

    def seen(self, tokens):
        return SeenTone(tokens)


@dataclass(frozen=True)
class SeenTone:
    tokens: int
    kind = KIND
    scaled = None


class ToneTower:
    """Encodes one tone in each slice. encoded: the payloads so far."""

    turns, row_bytes, together = False, 4, 0

    def __init__(self):
        self.encoded = []

    def grid(self, item):
        return None

    def start(self, items, payloads):
        assert {(item.kind, item.form) for item in items} == {(KIND, ToneLayout.form)}
        self.encoded += payloads

    def advance(self, budget_s):
        return True

    def rows(self, index, begin, end):
        numbers = np.array([[int(n)] for n in self.encoded[-1].split(b",")], np.float32)
        return numbers[begin:end]
