"""Compiles grammars as the server does, for a small vocabulary."""

import functools

import pytest

from tests.helpers.tiny import tiny_end_ids, tiny_model


@pytest.fixture(scope="module")
def allows():
    """Return a function (form, text) that tells whether the grammar of `form` allows `text`."""
    from cpuserve.engine.grammars.compiler import Compiler
    from cpuserve.tokenizer.tokenizer import Tokenizer

    compiler = Compiler(tiny_model("llama"), 512, sorted(tiny_end_ids("llama")))
    loaded = Tokenizer.load(tiny_model("llama"))

    @functools.lru_cache(maxsize=32)
    def compiled(key):
        return compiler.compile(compiler.prepare(*key))

    def allowed(form, text):
        matcher = compiled(form.key).deep_copy()
        ids = loaded.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return allowed
