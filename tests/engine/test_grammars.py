"""Grammars in the engine: compilation beside running streams, masks in steps, and every failure."""

import itertools
import json
import threading
from array import array
from pathlib import Path

import jsonschema
import pytest

from cpuserve.config.speculation import Speculation
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.engine.grammars import client, process
from cpuserve.engine.ipc import Abort, AddRequest
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.fake_executor import REPEATS, fake_config, fake_core, reference
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_end_ids, tiny_model

PROMPT = [11, 12, 13, 14, 15]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "color": {"enum": ["red", "green"]},
        "few": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["ok", "color", "few"],
    "additionalProperties": False,
}
# References that nest more deeply than the library's stack: it ends the process that compiles it.
BOMB = {
    "$ref": "#/$defs/d0",
    "$defs": {
        **{f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)},
        "d5000": {"type": "string"},
    },
}


class Engine:
    """A core over a fake model, whose loop waits for compilations as run_loop does."""

    def __init__(self, **config):
        path = str(tiny_model("llama"))
        options = {"max_num_seqs": 4, "kv_blocks": 600, "max_model_len": 600, **config}
        self.core = fake_core(fake_config(tokenizer_path=path, **options))
        self.tokenizer = Tokenizer.load(Path(path))
        self.woken = threading.Event()
        self.core.wake = self.woken.set
        self.outputs = {}
        self.count = 0

    def add(self, prompt=PROMPT, priority=0, **params):
        """Add a request and return its number."""
        self.count += 1
        sampling = SamplingParams(**{"seed": self.count, "max_tokens": 500, **params})
        message = AddRequest(self.count, array("i", prompt).tobytes(), sampling, 0.0, priority)
        self.core.handle(message)
        return self.count

    def json(self, schema=SCHEMA, **params):
        return self.add(structured_outputs=StructuredOutputs(json=schema), **params)

    def step(self):
        for output in self.core.step().outputs:
            self.outputs.setdefault(output.id, []).append(output)

    def run(self, until=lambda: False):
        """Run until nothing is left, or until `until`."""
        while not until():
            if self.core.has_work:
                self.step()
            elif self.core.scheduler.requests:  # all of them wait for their grammars
                assert self.woken.wait(PATIENCE_S), "no grammar was compiled"
                self.woken.clear()
            else:
                return

    def run_to_ready(self, number):
        """Run until the grammar of a request is compiled, without a token of it."""
        assert not self.core.scheduler.requests[number].ready
        self.run(lambda: bool(self.outputs.get(number)))

    def tokens(self, number):
        return list(itertools.chain.from_iterable(o.tokens for o in self.outputs[number]))

    def text(self, number):
        return self.tokenizer.decode(self.tokens(number))

    def last(self, number):
        return self.outputs[number][-1]

    @property
    def process(self):
        return self.core._grammars._process

    def check_idle(self):
        assert not self.core.has_work
        assert self.core.check() == {"ok": True}
        assert self.core.kv.num_free == self.core.kv.num_blocks
        assert not self.core.executor.model.slots


@pytest.fixture
def engine():
    made = Engine()
    yield made
    made.core.close()


def test_answers_with_a_schema_are_valid_and_streams_beside_them_unchanged(engine):
    free = [engine.add(max_tokens=60, ignore_eos=True) for _ in range(2)]
    bound = [engine.json() for _ in range(12)]
    engine.run()
    for number in free:
        want = reference(PROMPT, SamplingParams(max_tokens=60), number, 60)
        assert engine.tokens(number) == want
    texts = [engine.text(number) for number in bound]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 6, "the seeds make no difference"
    assert all(engine.last(number).finish == "stop" for number in bound)
    assert all(engine.tokens(number)[-1] in tiny_end_ids("llama") for number in bound)
    engine.check_idle()


def test_a_grammar_for_a_later_request_is_compiled_and_masks_nothing(engine):
    later = StructuredOutputs(json=SCHEMA, later=True)
    first = engine.add(structured_outputs=later, max_tokens=60, ignore_eos=True)
    engine.run()
    assert engine.tokens(first) == reference(PROMPT, SamplingParams(max_tokens=60), first, 60)
    second = engine.json()
    assert engine.core.scheduler.requests[second].ready
    engine.run()
    jsonschema.validate(json.loads(engine.text(second)), SCHEMA)
    engine.check_idle()


def test_a_faulty_grammar_for_a_later_request_is_refused_at_once(engine):
    number = engine.add(structured_outputs=StructuredOutputs(regex="(", later=True))
    engine.run()
    (output,) = engine.outputs[number]
    assert (output.tokens, output.finish, output.fault) == ([], "error", "structured_outputs")
    engine.check_idle()


def test_requests_with_different_grammars_get_their_own_masks():
    engine = Engine(max_num_seqs=8, threads=8)
    words = ["".join(pair) for pair in itertools.product("abcd", repeat=2)]
    forms = [StructuredOutputs(regex=f"{word}{{1,30}}") for word in words]
    for form in forms:
        engine.add(structured_outputs=form, max_tokens=1)
    engine.run()  # all grammars are ready now
    numbers = [engine.add(structured_outputs=form) for form in forms[::-1]]
    engine.run()
    for number, word in zip(numbers, words[::-1], strict=True):
        text = engine.text(number)
        assert text[0] == word[0]
        assert set(text[1:]) == {word[1]}
    engine.core.close()


def test_without_a_grammar_there_is_neither_a_process_nor_a_mask(engine):
    seen = []
    step = engine.core.executor.step
    engine.core.executor.step = lambda arrays: seen.append(arrays) or step(arrays)
    engine.add(max_tokens=5)
    engine.run()
    assert engine.core._grammars is None
    assert all(arrays.masks is None and arrays.words[4] == 0 for arrays in seen)


def test_streams_go_on_while_a_grammar_compiles_and_it_is_no_work(engine):
    waiting = engine.json()
    assert not engine.core.has_work
    free = engine.add(max_tokens=30, ignore_eos=True)
    for _ in range(5):
        engine.step()
    assert len(engine.tokens(free)) == 5
    engine.run()
    jsonschema.validate(json.loads(engine.text(waiting)), SCHEMA)
    assert len(engine.tokens(free)) == 30


def test_a_compiled_grammar_is_ready_at_once_for_the_next_request(engine):
    first = engine.json()
    engine.run()
    again = engine.json(seed=first)
    assert engine.core.scheduler.requests[again].ready
    engine.run()
    assert engine.tokens(again) == engine.tokens(first)


def test_a_schema_that_cannot_be_compiled_ends_its_requests_alone(engine):
    bad = {"type": "sound"}
    form = StructuredOutputs(json=bad, role="tools")
    numbers = [engine.add(structured_outputs=form), engine.json(bad), engine.json()]
    free = engine.add(max_tokens=3)
    engine.run()
    late = engine.json(bad)  # the failure is remembered
    engine.run()
    for number, field in ((numbers[0], "tools"), (late, "structured_outputs")):
        (output,) = engine.outputs[number]
        assert (output.finish, output.fault) == ("error", field)
        assert output.error.startswith(f"{field} cannot be compiled to a grammar: ")
        assert "sound" in output.error
    assert engine.last(numbers[1]).fault == "structured_outputs"
    assert engine.last(numbers[2]).finish == "stop"
    assert engine.last(free).finish == "length"
    engine.check_idle()


def test_a_schema_bomb_is_refused_and_answers_beside_it_go_on(engine):
    running = engine.json()
    engine.run_to_ready(running)
    process = engine.process
    bomb, after = engine.json(BOMB), engine.json({"enum": ["fine"]})
    engine.run()
    assert engine.last(bomb).fault == "structured_outputs"
    assert "too complex" in engine.last(bomb).error
    jsonschema.validate(json.loads(engine.text(running)), SCHEMA)
    assert engine.text(after) == '"fine"'
    assert engine.process is process
    engine.check_idle()


def test_a_request_that_is_aborted_while_its_grammar_compiles_leaves_nothing(engine):
    gone, kept = engine.json(), engine.json()
    engine.core.handle(Abort([gone]))
    engine.run()
    assert gone not in engine.outputs
    jsonschema.validate(json.loads(engine.text(kept)), SCHEMA)
    engine.check_idle()
    lonely = engine.json({"enum": [1, 2]})
    engine.core.handle(Abort([lonely]))
    engine.run()
    assert lonely not in engine.outputs
    engine.check_idle()


@pytest.mark.deep
def test_a_process_that_ends_while_it_compiles_is_an_error_and_is_replaced(engine, monkeypatch):
    monkeypatch.setattr(process, "MODULE", "tests.helpers.no_such_module")
    lost = engine.json()
    engine.run()
    assert engine.last(lost).error.endswith("now: the process for grammars has ended")
    assert engine.last(lost).unavailable
    assert engine.last(lost).fault is None
    monkeypatch.undo()
    again = engine.json()
    engine.run()
    jsonschema.validate(json.loads(engine.text(again)), SCHEMA)


@pytest.mark.deep
def test_preemption_does_not_change_an_answer():
    texts = []
    for kv_blocks in (600, 24):
        engine = Engine(kv_blocks=kv_blocks, max_model_len=96)
        numbers = [engine.json(SMALL, max_tokens=80) for _ in range(6)]
        engine.run()
        texts.append([engine.text(number) for number in numbers])
        assert (engine.core.stats.preemptions > 0) == (kv_blocks == 24)
        engine.check_idle()
        engine.core.close()
    assert texts[0] == texts[1]


@pytest.mark.deep
def test_a_request_that_comes_back_to_its_slot_does_not_use_the_mask_of_another_one():
    engine = Engine(max_num_seqs=1, scheduling_policy="priority")
    form = StructuredOutputs(regex="b{20}")
    engine.add(structured_outputs=form)
    engine.run()  # so that this form is ready at once
    low = engine.add(structured_outputs=StructuredOutputs(regex="a{30}"))
    engine.run(lambda: len(engine.outputs.get(low, ())) == 5)
    high = engine.add(structured_outputs=form, priority=-1)
    engine.run()
    assert engine.core.stats.preemptions == 1
    assert (engine.text(low), engine.text(high)) == ("a" * 30, "b" * 20)
    engine.core.close()


SMALL = {"type": "string", "minLength": 40, "maxLength": 50}


def test_an_answer_ends_where_its_grammar_does_whatever_else_is_asked(engine):
    word = StructuredOutputs(choice=["yes", "no"])
    for params in ({"ignore_eos": True}, {"min_tokens": 100}, {"logit_bias": {300: 100.0}}):
        number = engine.add(structured_outputs=word, **params)
        engine.run()
        assert engine.text(number) in ("yes", "no")
        assert engine.last(number).finish == "stop"
    longer = engine.add(structured_outputs=StructuredOutputs(regex="(ab)+"), min_tokens=9)
    engine.run()
    assert len(engine.tokens(longer)) > 9


def test_stop_token_ids_may_follow_where_the_text_may_end(engine):
    stop = 380
    assert stop not in tiny_end_ids("llama")
    form = StructuredOutputs(regex="[ab]{1,400}")
    numbers = [engine.add(structured_outputs=form, stop_token_ids=[stop]) for _ in range(20)]
    engine.run()
    ends = [engine.last(number).stop_id for number in numbers]
    assert stop in ends
    for number, end in zip(numbers, ends, strict=True):
        if end == stop:
            assert set(engine.tokenizer.decode(engine.tokens(number)[:-1])) <= set("ab")


GUESSES = Speculation(
    method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1
)
# Forms with texts that the grammar determines, texts that repeat, and free texts.
FORMS = [
    {"regex": "(ab){60}"},
    {"regex": "[ab]{3}(abracadabra)?(ab|ba){30}"},
    {"json": {**SCHEMA, "properties": {**SCHEMA["properties"], "numbers": {"type": "number"}}}},
    {"json": {"type": "array", "items": {"const": "the same word"}, "minItems": 5, "maxItems": 9}},
    {"choice": ["a long answer that has one end", "another"]},
]
FIELDS = [
    {},
    {"logprobs": 2},
    {"min_tokens": 30},
    {"min_tokens": 400},
    {"stop_token_ids": [380, 93]},
    {"bad_words": ["ab"]},
    {"frequency_penalty": 0.3},
    {"max_tokens": 7},
]


def forms(engine):
    """Add requests with each form and fields, and free ones; return their numbers."""
    numbers = []
    for i, form in enumerate(FORMS):
        for fields in FIELDS[i % 2 :: 2]:
            numbers.append(engine.add(structured_outputs=StructuredOutputs(**form), **fields))
        numbers.append(engine.add(max_tokens=100, ignore_eos=True, seed=REPEATS + i))
    return numbers


def told(engine, number):
    """What a client learns of a response."""
    outputs = engine.outputs[number]
    rows = [row for output in outputs for row in output.logprobs or ()]
    last = outputs[-1]
    return engine.tokens(number), rows, last.finish, last.stop_id, last.error, last.fault


def possible(budget, chances):
    """How many drafts a step has tokens for, up to the first one that cannot be right."""
    likely = list(itertools.takewhile(lambda chance: chance > 0.0, chances))
    return min(len(likely), max(budget.tokens, 0))


@pytest.mark.parametrize("kv_blocks", [900, 60])
def test_drafts_and_forced_tokens_change_no_answer_with_a_grammar(monkeypatch, kv_blocks):
    answers, steps = [], []
    for speculation in (None, GUESSES):
        engine = Engine(speculation=speculation, kv_blocks=kv_blocks, max_num_seqs=6)
        if speculation is not None:
            monkeypatch.setattr(DraftBudget, "count", possible)
            monkeypatch.setattr(DraftBudget, "is_worth", True)
        numbers = forms(engine)
        engine.run()
        answers.append([told(engine, number) for number in numbers])
        steps.append(engine.core.executor.model.steps)
        if speculation is not None:
            found = [engine.outputs[number] for number in numbers]
            assert sum(len(o.tokens) > 1 for outputs in found for o in outputs) > 40
            assert engine.core.stats.accepted_tokens > 40
        assert (engine.core.stats.preemptions > 0) == (kv_blocks == 60)
        engine.check_idle()
        engine.core.close()
    assert answers[0] == answers[1]
    assert steps[1] < 0.7 * steps[0]


def test_forced_tokens_take_no_step_of_their_own(monkeypatch):
    monkeypatch.setattr(DraftBudget, "count", possible)
    monkeypatch.setattr(DraftBudget, "is_worth", True)
    engine = Engine(speculation=GUESSES)
    number = engine.add(structured_outputs=StructuredOutputs(regex="x[yz]" + "w" * 40))
    engine.run()
    assert engine.text(number)[2:] == "w" * 40
    counts = [len(output.tokens) for output in engine.outputs[number]]
    most = client.MOST_JUMPS + 1 + GUESSES.num_speculative_tokens
    assert counts == [1, 1, most, most, 1]
    assert engine.core.stats.draft_tokens == engine.core.stats.accepted_tokens == 2 * (most - 1)
    engine.check_idle()
    engine.core.close()


def test_a_grammar_that_other_fields_contradict_is_an_error_of_that_request(engine):
    form = StructuredOutputs(choice=["yes"])
    number = engine.add(structured_outputs=form, allowed_token_ids=[5])
    beside = engine.json()
    engine.run()
    assert engine.last(number).fault == "structured_outputs"
    assert "structured_outputs and allowed_token_ids" in engine.last(number).error
    assert engine.last(beside).finish == "stop"
    engine.check_idle()


@pytest.mark.deep
def test_grammars_used_least_recently_are_forgotten(engine, monkeypatch):
    monkeypatch.setattr(client, "MAX_GRAMMARS", 2)
    for word in ("a", "b", "c"):
        engine.json({"const": word})
        engine.run()
    known = [key[1] for key, _ in engine.core._grammars._known]
    assert known == ['{"const":"b"}', '{"const":"c"}']
    again = engine.json({"const": "a"})
    assert not engine.core.scheduler.requests[again].ready
    engine.run()
    assert engine.text(again) == '"a"'


@pytest.mark.deep
def test_closing_ends_the_process_also_while_it_compiles():
    idle, busy = Engine(), Engine()
    idle.json()
    idle.run()
    process = idle.process._process
    idle.core.close()
    assert process.returncode is not None
    busy.json()
    busy.core.close()
    assert busy.process is None or busy.process._process.returncode is not None
