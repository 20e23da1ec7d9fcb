"""Random texts that match a grammar: each token is drawn from the tokens that its mask allows."""

import json

import numpy as np

from cpuserve.engine.grammars.compiler import Compiler, take
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

VOCAB = 512
ENDS = sorted(tiny_end_ids("llama"))
# After so many tokens a walk prefers the tokens that end texts, lists and objects.
FREE_TOKENS = 60
MOST_TOKENS = 3000


class Walker:
    """Walks with the tokenizer of the tiny Llama model, or with another."""

    def __init__(self, model=None, vocab=VOCAB, ends=ENDS):
        model = model or tiny_model("llama")
        self.compiler = Compiler(model, vocab, ends)
        tokenizer = Tokenizer.load(model)
        self.bytes = {i: tokenizer.token_bytes(i) for i in range(vocab)}
        self._ends = ends
        of = {text: i for i, text in self.bytes.items()}
        self._closing = [of[text] for text in (b'"', b"}", b"]", b"@", b":")]

    def matcher(self, kind, text):
        """Return the matcher of a grammar; GrammarError if its first mask cannot be computed."""
        matcher = self.compiler.compile(self.compiler.prepare(kind, text))
        self.compiler.fill(matcher.deep_copy(), np.zeros(self.compiler.words, np.int32), ())
        return matcher

    def text(self, matcher, rng, free=FREE_TOKENS, is_whole=False):
        """A random text of the grammar, as bytes; is_whole: whether it is one JSON value."""
        matcher, mask = matcher.deep_copy(), np.zeros(self.compiler.words, np.int32)
        found = tail = b""
        for count in range(MOST_TOKENS):
            self.compiler.compute(mask.reshape(1, -1), [(matcher, 0)], 1)
            self.compiler.finish(matcher, mask, (), tail, is_whole)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = self._choose({int(i) for i in allowed}, rng, count > free)
            if token in self._ends:
                return found
            found += self.bytes[token]
            take(matcher, [token])
            tail = self.compiler.tails.after(tail, [token])
        msg = f"no end after {MOST_TOKENS} tokens: {found[:200]}"
        raise AssertionError(msg)

    def _choose(self, allowed, rng, late):
        for token in self._ends[:1] + self._closing:
            if token in allowed and rng.random() < (0.5 if late else 0.2):
                return token
        return rng.choice(sorted(allowed))

    def values(self, schema, rng, count, kind="json", free=FREE_TOKENS):
        """JSON values of random texts that fit a schema."""
        matcher = self.matcher(kind, json.dumps(schema))
        is_whole = kind in ("json", "open_json")
        return [json.loads(self.text(matcher, rng, free, is_whole)) for _ in range(count)]
