"""The keys of heads are in the offload tiers, beside those of the model: guesses stay as good."""

from __future__ import annotations

import math

import msgspec
import pytest

from cpuserve import SamplingParams
from cpuserve.core.kv.cache_folder import FOLDER
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.engine.inline import InlineClient
from cpuserve.engine.speculation import draft_head
from cpuserve.engine.speculation.model_proposer import ModelProposer
from cpuserve.engine.speculation.texts import DraftTexts
from cpuserve.loader.load import read_config
from cpuserve.models import spec_from_config
from tests.helpers.depth import deep_but
from tests.helpers.drafters import NAMED, Drafter, with_drafter
from tests.helpers.eagle_head import eagle_head
from tests.helpers.every_kind import tight_engine
from tests.helpers.guess_head import FAMILIES, with_head
from tests.helpers.patience import wait_until
from tests.helpers.tiny import tiny_model
from tests.llm.test_draft_head import plain_params
from tests.llm.test_speculation import SIZES

pytestmark = pytest.mark.usefixtures("hasty", "no_ngrams")
PROMPT, CACHED = [3 + 7 * i % 370 for i in range(150)], 128
OTHERS = [[5 + (11 * i + n) % 300 for i in range(150)] for n in range(4)]


@pytest.fixture
def no_ngrams(monkeypatch):
    monkeypatch.setattr(NgramDrafts, "propose", lambda *_: ([], []))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """drafter(family, seed) = a model and the head that guesses: its own, or one of EAGLE-3."""
    made = {}

    def get(family, seed=1):
        if (family, seed) not in made:
            directory = tmp_path_factory.mktemp("kept") / "m"
            if family != "eagle3":
                path = with_head(directory, family, dtype="bfloat16", seed=seed)
                made[family, seed] = Drafter(path, {"method": "mtp"})
                return made[family, seed]
            path = tiny_model("llama", dtype="bfloat16")
            width = spec_from_config(read_config(path)).width
            head = eagle_head(directory, width, seed=seed, **NAMED)
            made[family, seed] = Drafter(path, {"method": "eagle3", "model": str(head)})
        return made[family, seed]

    return get


def make(drafter, *, head=True, **options):
    return with_drafter(drafter, guesses=head, **{**SIZES, **options})


@pytest.fixture
def seen(monkeypatch):
    """For each row of a head the first position of its text, and its own; and all guesses."""
    rows, guesses = [], []
    step, guess = DraftTexts.run, ModelProposer._guess

    def watch_step(self, chunks):
        firsts = {text.slot: text.first_position for text in self.by_request.values()}
        rows.extend((firsts[c.slot], c.start + firsts[c.slot]) for c in chunks)
        return step(self, chunks)

    def watch_guess(self, turn, row):
        guesses.append(row.token)
        return guess(self, turn, row)

    monkeypatch.setattr(DraftTexts, "run", watch_step)
    monkeypatch.setattr(ModelProposer, "_guess", watch_guess)
    return rows, guesses


@pytest.fixture
def kept(monkeypatch):
    """The offload of each head, in order."""
    found, keep = [], ModelProposer.keep

    def watch(self, offload):
        found.append(offload)
        keep(self, offload)

    monkeypatch.setattr(ModelProposer, "keep", watch)
    return found


def ask(llm, seen, *, cached=CACHED):
    """Return the response, the guesses and how many were right; which rows: see `seen`."""
    for found in seen:
        found.clear()
    before = llm._client.stats.accepted_tokens
    (output,) = llm.generate([PROMPT], plain_params(0.8, 1))
    assert output.num_cached_tokens == cached
    return output.outputs[0].token_ids, [*seen[1]], llm._client.stats.accepted_tokens - before


def firsts(seen):
    return {first for first, _ in seen[0]}


@pytest.mark.parametrize("family", deep_but(["glm4-moe", "eagle3"], (*FAMILIES, "eagle3")))
def test_after_a_restart_a_head_guesses_as_before(patient_offload, drafter, seen, tmp_path, family):
    found, options = drafter(family), {"prefix_cache_dir": str(tmp_path)}
    with make(found, **options) as llm:
        ask(llm, seen, cached=0)
        before = ask(llm, seen)
        assert len(before[1]) > 20
    with make(found, **options) as llm:
        assert ask(llm, seen) == before
        assert firsts(seen) == {0}
        assert min(start for _, start in seen[0]) == CACHED
        assert llm._client.ask_now("report")["draft_blocks_restored"] == CACHED // 32


def test_a_head_finds_its_keys_in_files_of_another_server(patient_offload, drafter, seen, tmp_path):
    found = drafter("glm4-moe")
    with make(found, prefix_cache_dir=str(tmp_path)) as llm:
        ask(llm, seen, cached=0)
        before = ask(llm, seen)
    with make(found, kv_tiers=[f"shared={tmp_path}"]) as llm:
        assert ask(llm, seen) == before
        assert firsts(seen) == {0}


def test_an_idle_engine_writes_the_keys_of_a_head_to_files(
    patient_offload, monkeypatch, drafter, seen, kept, tmp_path
):
    # Nothing is written when the engine ends.
    monkeypatch.setattr(ModelProposer, "close", lambda self: self.texts.executor.close())
    found, options = drafter("glm4-moe"), {"prefix_cache_dir": str(tmp_path)}
    with make(found, **options) as llm:
        ask(llm, seen, cached=0)
        wait_until(lambda: not kept[0]._unsaved)
    with make(found, **options) as llm:
        ask(llm, seen)
        assert firsts(seen) == {0}


def test_blocks_of_model_and_head_have_one_limit_in_the_swap_space(patient_offload, drafter, kept):
    with tight_engine(drafter("glm4-moe"), max_model_len=256, max_num_seqs=2) as llm:
        tier = kept[-1].tiers[0]._tier
        tier._max_bytes = limit = 20 * max(tier._sizes)
        kinds, most = set(), 0
        for other in OTHERS * 2:
            llm.generate([other], plain_params(0.0, 1, 60))
            kinds |= {group for _, group, _ in tier}
            most = max(most, tier.num_bytes)
        assert len(kinds) == len(tier._sizes) == 2
        assert limit / 2 < most <= limit
        assert most >= sum(len(data) for *_, data in tier)


@pytest.mark.parametrize("family", deep_but(["glm4-moe"], ["glm4-moe", "qwen3.5", "eagle3"]))
def test_a_head_guesses_as_before_after_its_keys_were_evicted(
    patient_offload, drafter, seen, family
):
    with tight_engine(drafter(family), max_model_len=256, max_num_seqs=2) as llm:
        ask(llm, seen, cached=0)
        before = ask(llm, seen)
        for other in OTHERS:
            llm.generate([other], plain_params(0.0, 1, 60))
        report = llm._client.ask_now("report")
        assert report["blocks_saved"] > 0
        assert ask(llm, seen) == before
        assert firsts(seen) == {0}
        assert llm._client.ask_now("report")["draft_blocks_restored"] > 0


def test_the_keys_of_another_head_are_not_read(patient_offload, drafter, seen, tmp_path):
    """All find the blocks of the model, in one folder; those of the first head are beside them."""
    options = {"prefix_cache_dir": str(tmp_path)}
    with make(drafter("eagle3"), **options) as llm:
        want = ask(llm, seen, cached=0)[0]
    for seed, first in ((2, CACHED), (1, 0)):
        with make(drafter("eagle3", seed), **options) as llm:
            assert ask(llm, seen)[0] == want
            assert firsts(seen) == {first}
    with make(drafter("eagle3"), head=False, **options) as llm:
        assert ask(llm, seen)[0] == want
    assert len([folder for folder in (tmp_path / FOLDER).glob("*") if folder.is_dir()]) == 1


def test_a_head_finds_no_keys_in_files_of_an_engine_without_one(
    patient_offload, drafter, seen, tmp_path
):
    found, options = drafter("glm4-moe"), {"prefix_cache_dir": str(tmp_path)}
    with make(found, head=False, **options) as llm:
        want = ask(llm, seen, cached=0)[0]
    with make(found, **options) as llm:
        assert ask(llm, seen)[0] == want
        assert firsts(seen) == {CACHED}


def test_a_head_begins_anew_after_a_block_that_a_tier_has_lost(
    patient_offload, drafter, seen, tmp_path
):
    found, options = drafter("glm4-moe"), {"prefix_cache_dir": str(tmp_path)}
    with make(found, head=False, **options) as llm:
        want = ask(llm, seen, cached=0)[0]
    known = {*tmp_path.glob("**/*.kv")}
    with make(found, **options) as llm:
        llm.generate([[*PROMPT[1:], 9]], plain_params(0.8, 1))
    # Files of a head have the fewest bytes.
    new = sorted({*tmp_path.glob("**/*.kv")} - known, key=lambda path: path.stat().st_size)
    for path in new[: len(new) // 2]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with make(found, **options) as llm:
        assert ask(llm, seen)[0] == want
        seen[0].clear()
        (output,) = llm.generate([[*PROMPT[1:], 9]], plain_params(0.8, 1))
        assert output.num_cached_tokens == CACHED
        assert firsts(seen) == {CACHED}


@pytest.mark.parametrize("family", deep_but(["glm4-moe"], ["glm4-moe", "qwen3.5", "mimo-v2"]))
def test_a_head_follows_its_model_that_restores_a_block_a_step(
    patient_closes, monkeypatch, drafter, seen, tmp_path, family
):
    monkeypatch.setattr("cpuserve.core.cost.CostModel.restores", lambda *_: True)
    found, options, steps = drafter(family), {"prefix_cache_dir": str(tmp_path)}, []
    with make(found, **options) as llm:
        ask(llm, seen, cached=0)
        before = ask(llm, seen)
    schedule, reach = Scheduler.schedule, draft_head.DraftHead._reach

    def slow(self):
        self._moving_s = 0.0
        return schedule(self)

    def watch(self, sequence, ids, end):
        reach(self, sequence, ids, end)
        steps.append(sequence.computed)

    monkeypatch.setattr(Scheduler, "schedule", slow)
    monkeypatch.setattr(draft_head.DraftHead, "_reach", watch)
    monkeypatch.setattr(draft_head, "MOVING_S", math.inf)
    with make(found, **options) as llm:
        assert ask(llm, seen) == before
        assert firsts(seen) == {0}
    assert [step for step in steps if step <= CACHED][:4] == [32, 64, 96, 128]


def test_a_head_without_time_for_its_keys_begins_anew(
    patient_offload, monkeypatch, drafter, seen, tmp_path
):
    found, options = drafter("glm4-moe"), {"prefix_cache_dir": str(tmp_path)}
    with make(found, **options) as llm:
        want = ask(llm, seen, cached=0)[0]
    with make(found, **options) as llm:
        monkeypatch.setattr("cpuserve.core.kv.offload.Offload.has_time", False)
        assert ask(llm, seen)[0] == want
        assert firsts(seen) == {CACHED}


@pytest.mark.parametrize("tokens", deep_but([0, 11], [0, 10, 11, 12, 13, 43]))
@pytest.mark.parametrize("family", deep_but(["glm4-moe"], ["glm4-moe", "qwen3.5", "eagle3"]))
def test_a_head_attends_to_all_of_the_last_turn(drafter, seen, family, tokens):
    """The last step of a response of 11 tokens fills a block; so does a prompt without one."""
    with make(drafter(family), max_model_len=256) as llm:
        prompt = PROMPT if tokens else [*PROMPT, *range(5, 15)]
        (output,) = llm.generate([prompt], turn(tokens))
        said = [*prompt, *output.outputs[0].token_ids]
        seen[0].clear()
        (output,) = llm.generate([[*said, 7, 8, 9]], turn(8))
        assert output.num_cached_tokens == (len(said) - bool(tokens)) // 32 * 32
        assert firsts(seen) == {0}


def turn(tokens):
    return SamplingParams(max_tokens=tokens, temperature=0.8, seed=tokens, ignore_eos=True)


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """Engines read blocks from each other, as those of one server do in shared memory."""

    def client(config):
        folder = {"shared_prefix_dir": str(tmp_path), "shared_prefix_bytes": 1 << 26}
        return InlineClient(msgspec.structs.replace(config, shares_prefixes=True, **folder))

    monkeypatch.setattr("cpuserve.engine.inline.InlineClient", client)


@pytest.mark.usefixtures("shared", "patient_offload")
@pytest.mark.parametrize("family", deep_but(["glm4-moe"], ["glm4-moe", "qwen3.5", "eagle3"]))
def test_another_engine_of_the_host_finds_the_keys_of_a_head(drafter, seen, kept, family):
    """The first engine computes a turn and the beginning of the next one, which the other gets."""
    found = drafter(family)
    with make(found, max_model_len=256) as one, make(found, max_model_len=256) as other:
        (output,) = one.generate([PROMPT], turn(12))
        ahead = [*PROMPT, *output.outputs[0].token_ids, *range(5, 35)]
        one.generate([ahead], turn(0))
        one._client.ask_now("report")  # the head computes a prompt after its response was sent
        wait_until(lambda: not (kept[0]._unsaved or kept[0].tiers[0]._tier._pending))
        answers = []
        for llm in (other, one):
            for rows in seen:
                rows.clear()
            (output,) = llm.generate([[*ahead, 7]], turn(30))
            assert output.num_cached_tokens >= 0.97 * len(output.prompt_token_ids)
            assert firsts(seen) == {0}
            assert min(start for _, start in seen[0]) == output.num_cached_tokens
            answers.append((output.outputs[0].token_ids, [*seen[1]]))
        assert answers[0] == answers[1]
        assert len(seen[1]) > 10
        assert other._client.ask_now("report")["draft_blocks_restored"] == len(ahead) // 32
