"""NgramDrafts: propose draft tokens by n-grams; build the indexes in slices and within a limit."""

from __future__ import annotations

import math

from cpuserve.base.ids import RequestId
from cpuserve.core.request import Request
from cpuserve.core.speculation.ended_responses import EndedResponses
from cpuserve.core.speculation.ngram import IndexedText, MakeIndex

# A step indexes at most SLICE tokens of texts that have no complete index yet. With three sizes of
# n-grams and a prompt of 128k tokens this takes 0.3 ms, and 1.1 ms while other programs use all
# caches, so other streams do not seem to pause.
SLICE = 2048
# The memory of a new index has no pages yet. A token writes to random ones, and a new page takes as
# long as 13 tokens, so the first slices of a long text have fewer tokens: 2048 tokens at once took
# 1.4 to 1.9 ms with 128k tokens. Indexes of up to _FEW_PAGES tokens have few pages.
# An index has a page for _PAGE_TOKENS tokens, and a token uses three.
_DEAREST, _PAGE_TOKENS, _FEW_PAGES = 40.0, 213.0, 1 << 15
# An index that lacks at most LATE tokens of its text learns from each of these tokens.
LATE = 128
# An index is dropped after this number of steps in a row without drafts that could pay.
RESTS = 64
# After FEW_MISSES looks in a row without a draft that pays, an index is asked in every second step,
# after STEP more in every fourth one, and after as many more in every eighth one. A draft that pays
# halves the number of misses: where such drafts are rare, looking for them costs too much.
FEW_MISSES, STEP = 8, 4
MOST_MISSES = FEW_MISSES + 3 * STEP
LONGEST_WAIT = 7
# The memory of an index is reserved for at least this number of tokens (kLeastTokens in C++).
LEAST_RESERVED = 256
# A text that outgrows its reserved memory reserves as much for its tokens, or a fourth more.
GROWTH = 4
# An index that has missed so often in a row is dropped for another one that grows.
MANY_MISSES = 64


class NgramDrafts:
    """Indexes the texts of running requests, after the last responses of the same salt.

    texts: the indexes, by the id of their request.
    most_tokens: the number of tokens that all indexes together may have. An index reserves memory
      for the text so far, and a part more whenever the text has outgrown it. If there is no more
      memory, an index without drafts that pay is dropped, or else the one that grows;
      its request gets no other one.
    """

    def __init__(self, make_index: MakeIndex, most_tokens: int) -> None:
        self.reserved = 0
        self._make_index = make_index
        self._most_tokens = most_tokens
        self._slice = 0
        self._step = 0
        self.texts: dict[RequestId, IndexedText] = {}
        self._denied: set[RequestId] = set()  # requests that get no index any more
        self._ended = EndedResponses()

    def begin(self, rested: int = 0) -> None:
        """Begin the proposals after a step; rested: how many steps before it had no proposals."""
        self._slice = SLICE
        self._step += 1 + rested

    def propose(self, request: Request, count: int) -> tuple[list[int], list[float]]:
        """Return up to `count` draft tokens of a request, and their chances (TextIndex.chances)."""
        text = self.texts.get(request.id)
        if text is None:
            text = self._begin_text(request)
        elif len(request.token_ids) < text.due:
            return [], []
        if text is None or not self._catch_up(request, text):
            return [], []
        drafts = text.index.guess(count)
        return drafts, text.index.chances(len(drafts)) if drafts else []

    def look_again(self, request: Request, *, has_draft: bool) -> int:
        """Return for how many steps `propose` need not be asked for this request.

        has_draft: whether it had drafts that pay.
        """
        text, tokens = self.texts.get(request.id), len(request.token_ids)
        if text is None:
            return LONGEST_WAIT
        if text.tokens < len(text.earlier) + tokens:  # the index is being built, or waits
            return max(text.due - tokens - 1, 0)
        text.misses = min(text.misses, MOST_MISSES) // 2 if has_draft else text.misses + 1
        if text.misses <= FEW_MISSES:
            return 0
        doublings = 1 + (text.misses - FEW_MISSES - 1) // STEP
        # All texts that wait are looked at in the same steps, so that other steps do nothing.
        longest = min((1 << doublings) - 1, LONGEST_WAIT)
        wait = longest - self._step % (longest + 1)
        text.due = tokens + 1 + wait
        return wait

    def rest(self, request: Request, steps: int = 1) -> None:
        """Note that no draft can pay for some steps, so the index need not follow the text."""
        if (text := self.texts.get(request.id)) is not None:
            text.rests += steps
            if text.rests > RESTS:
                self.forget(request)

    def forget(self, request: Request) -> None:
        """Drop the index of a request that needs none for a while."""
        self._denied.discard(request.id)
        self._drop(request.id)

    def end(self, request: Request) -> None:
        """Drop the index of a request that ends, and keep its response for indexes to come."""
        self.forget(request)
        self._ended.add(request)

    def _drop(self, number: RequestId) -> None:
        if (text := self.texts.pop(number, None)) is not None:
            self.reserved -= text.reserved

    def _deny(self, number: RequestId) -> None:
        self._drop(number)
        self._denied.add(number)

    def _begin_text(self, request: Request) -> IndexedText | None:
        if request.id in self._denied:
            return None
        for response in (self._ended.of(request.chain.salt), ()):
            length = len(response) + len(request.token_ids)
            tokens = max(length, LEAST_RESERVED)
            if self._reserve(request.id, tokens):
                text = IndexedText(self._make_index(length), tokens, response)
                self.texts[request.id] = text
                return text
        return None

    def _reserve(self, number: RequestId, tokens: int) -> bool:
        """Reserve memory for `tokens` more tokens; False if all memory is in use."""
        while self.reserved + tokens > self._most_tokens:
            other_texts = (n for n in self.texts if n != number)
            rarest = max(other_texts, key=lambda n: self.texts[n].misses, default=None)
            if rarest is None or self.texts[rarest].misses < MANY_MISSES:
                return False
            self._deny(rarest)
        self.reserved += tokens
        return True

    def _catch_up(self, request: Request, text: IndexedText) -> bool:
        """Index the tokens that are new, or a slice of them; return whether the index has all."""
        begin = len(text.earlier)
        end = begin + len(request.token_ids)
        text.rests = 0
        if end > text.reserved:
            num_tokens = max(end - text.reserved, text.reserved // GROWTH)
            if not self._reserve(request.id, num_tokens):
                self._deny(request.id)
                return False
            text.reserved += num_tokens
        if text.tokens < begin and not self._add_slice(request, text, begin):
            return False
        if end - text.tokens <= LATE:
            text.index.advance(_tokens_of(request, text, end))
            text.tokens = end
            return True
        if not self._add_slice(request, text, end):
            return False
        text.index.advance([])  # look for the first match
        return True

    def _add_slice(self, request: Request, text: IndexedText, end: int) -> bool:
        """Index tokens up to `end`, or as many as the step has time for; return whether all are."""
        start = text.tokens
        price = price_of(start, text.reserved)
        reached = min(end, start + int(self._slice / price))
        self._slice -= math.ceil((reached - start) * price)
        text.index.add(_tokens_of(request, text, reached))
        text.tokens = reached
        return reached == end


def price_of(start: int, tokens: int) -> float:
    """Return the time for a token after the first `start` ones, in tokens of a complete index.

    tokens: the number of tokens that the index is made for.
    """
    pages = tokens / _PAGE_TOKENS
    new_share = math.exp(-3.0 * start / pages)  # the part of the pages that no token has used
    return 1.0 + min(_DEAREST, max(tokens - _FEW_PAGES, 0) / 2048) * new_share


def _tokens_of(request: Request, text: IndexedText, end: int) -> list[int]:
    """Return the tokens before `end`, of earlier responses and of the request, that are new."""
    start, begin = text.tokens, len(text.earlier)
    tokens = list(text.earlier[start:end])
    return tokens + indexed_tokens(request, max(start - begin, 0), max(end - begin, 0))


def indexed_tokens(request: Request, start: int, end: int) -> list[int]:
    """Return the tokens from `start` to `end - 1` of a request, as its index gets them.

    All tokens of a text reach its index through this function. It leaves out the placeholders
    of media, because no text repeats them. An index keeps a text of its own,
    so its positions may differ from the positions in the request.
    """
    ids, placeholders = request.token_ids, request.chain.placeholders
    if placeholders is None:
        return ids[start:end]
    tokens: list[int] = []
    for run in placeholders.runs(start, end):
        tokens += ids[start : run.begin]
        start = run.end
    return tokens + ids[start:end]
