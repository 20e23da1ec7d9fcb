"""NgramDrafts: propose draft tokens by n-grams; build the indexes in slices and within a limit."""

from __future__ import annotations

from cpuserve.core.ngram import IndexedText, MakeIndex
from cpuserve.core.request import Request

# A step indexes at most SLICE tokens of texts that have no complete index yet. With three sizes of
# n-grams and a prompt of 128k tokens this takes 0.3 ms, and 1.1 ms while other programs use all
# caches, so other streams do not seem to pause.
SLICE = 2048
# An index that lacks at most LATE tokens of its text learns from each of these tokens.
LATE = 128
# An index is dropped after this number of steps in a row without drafts that could pay.
RESTS = 64


class NgramDrafts:
    """Indexes the texts of running requests.

    most_tokens: the number of tokens that all indexes together may have. A request reserves its
      whole text, with the tokens that it may still generate, or it gets no index.
    """

    def __init__(self, make_index: MakeIndex, most_tokens: int) -> None:
        self.reserved = 0
        self._make_index = make_index
        self._most_tokens = most_tokens
        self._slice = 0

    def begin(self) -> None:
        """Begin the proposals after a step."""
        self._slice = SLICE

    def propose(self, request: Request, count: int) -> tuple[list[int], list[float]]:
        """Return up to `count` draft tokens of a request, and their chances (TextIndex.chances)."""
        text = request.text or self._begin_text(request)
        if text is None or not self._catch_up(request, text):
            return [], []
        drafts = text.index.guess(count)
        return drafts, text.index.chances(len(drafts))

    def rest(self, request: Request) -> None:
        """Note that no draft can pay now, so the index need not follow the text."""
        if request.text is not None:
            request.text.rests += 1
            if request.text.rests > RESTS:
                self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop the index of a request."""
        if request.text is not None:
            self.reserved -= request.text.reserved
            request.text = None

    def _begin_text(self, request: Request) -> IndexedText | None:
        tokens = request.num_prompt + request.max_tokens
        if self.reserved + tokens > self._most_tokens:
            return None
        self.reserved += tokens
        request.text = IndexedText(self._make_index(len(request.token_ids)), tokens)
        return request.text

    def _catch_up(self, request: Request, text: IndexedText) -> bool:
        """Index the tokens that are new, or a slice of them; return whether the index has all."""
        start, end = text.tokens, len(request.token_ids)
        text.rests = 0
        if end - start <= LATE:
            text.index.advance(indexed_tokens(request, start, end))
            text.tokens = end
            return True
        end = min(end, start + self._slice)
        self._slice -= end - start
        text.index.add(indexed_tokens(request, start, end))
        text.tokens = end
        if end < len(request.token_ids):
            return False
        text.index.advance([])  # look for the first match
        return True


def indexed_tokens(request: Request, start: int, end: int) -> list[int]:
    """Return the tokens from `start` to `end - 1` of a request, as its index gets them.

    All tokens of a text reach its index through this function. It leaves out the placeholders
    of pictures, because no text repeats them. An index keeps a text of its own,
    so its positions may differ from the positions in the request.
    """
    ids, pictures = request.token_ids, request.chain.placeholders
    if pictures is None:
        return ids[start:end]
    kept: list[int] = []
    for run in pictures.runs(start, end):
        kept += ids[start : run.begin]
        start = run.end
    return kept + ids[start:end]
