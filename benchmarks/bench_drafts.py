#!/usr/bin/env python3
"""Decode rate with speculative decoding, as a multiple of the rate without it; JSON lines.

usage: bench_drafts.py [MODEL] [--rounds 6] [--output-tokens 200] [--batch 1 ...]
                       [--again] [--speculative-config JSON]

Two engines in this process, one with and one without drafts, run the same requests in turn. The
texts: `code` asks the model to repeat a program with a change, and `quote` to repeat a passage;
these texts end by themselves. `prose` is a story at temperature 1,
and `random` is sampled at a temperature at which nothing repeats;
these two have --output-tokens. `--text rename` asks for a program of about 300 lines
with another name for its class; its first --output-tokens are generated.
Both engines must generate the same tokens, or the script fails.
`drafts_rate` has one sample per round; its facts are tokens per second of both engines,
drafts per token, and the share of drafts that were accepted. The pair of engines is started twice,
each time with another engine first, and runs half of the rounds each time,
because the location of its memory changes the rate of an engine by up to 5 %. The first round
of a pair, which trains the cost models of the engines, does not count.

Drafts also come from earlier responses of the same salt, so no round may repeat one by accident.
Sampled texts have new seeds in each round. Greedy ones have a new salt, and their prompts are
computed before the round. With --again, each round repeats a round that is not counted, with
its seeds and salt, so its drafts come from equal responses.

With one sequence (--batch 1) two facts compare the gain with what this machine allows. A step has
a price by its number of rows: the median time of the executor. A draft costs the mean time that
a model takes for one. `share_of_steps`: the gain, divided by the gain if the same steps had
taken these prices and nothing else. `share_of_depths`, if a model drafts: the gain, divided by the
gain of the best fixed number of drafts, if the drafts at each place of a step were right as often
as measured.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from statistics import median

from cpuserve import LLM, SamplingParams
from cpuserve.bench import programs
from cpuserve.bench.schema import Where, percentile, record
from cpuserve.cli.bench_flags import number
from cpuserve.engine.core import EngineCore
from cpuserve.runtime.native import NativeExecutor

CODE = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        return self.balance
"""
PASSAGE = (
    "The lighthouse stood on a rock that the sea covered twice a day. Its keeper, a woman of "
    "sixty, had counted every ship that passed since the war, and wrote their names in a book "
    "with a red cover. On the last night of October the lamp went out. She climbed the stairs "
    "with a lantern, and found a gull asleep between the lenses."
)
GREEDY = {"temperature": 0.0}
TEXTS = {
    "code": (f"Repeat this program, with the name Wallet:\n\n```python\n{CODE}```", GREEDY),
    "quote": (f"Repeat this text word for word:\n\n{PASSAGE}", GREEDY),
    "prose": ("Write a long story about a fox and a train.", {"temperature": 1.0}),
    "random": ("Write something.", {"temperature": 5.0}),
}
USUAL = list(TEXTS)
TEXTS["rename"] = (programs.rename(random.Random(1)), GREEDY)


def answer(llm, text, batch, tokens, series):
    """Return (tokens per second, token ids of each response) for `batch` copies of a text.

    series: a number that no other responses of this text and batch have, for seeds and salt.
    """
    prompt, sampling = TEXTS[text]
    requests = [[{"role": "user", "content": prompt}]] * batch
    salt = f"{text} {batch} {series if sampling == GREEDY else ''}"
    common = {**sampling, "cache_salt": salt}
    llm.chat(requests[:1], SamplingParams(max_tokens=1, **common), use_tqdm=False)
    params = [
        SamplingParams(
            max_tokens=tokens, ignore_eos=sampling != GREEDY, seed=series * batch + place, **common
        )
        for place in range(batch)
    ]
    started = time.perf_counter()
    outputs = llm.chat(requests, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    answers = [output.outputs[0].token_ids for output in outputs]
    return sum(map(len, answers)) / seconds, answers


class Steps:
    """The decode steps of an engine with one sequence, by their number of draft tokens."""

    def __init__(self):
        self.seconds = {}  # of the executor
        self.drafting_s = 0.0  # of the drafter's model
        self.tokens = self.drafts = 0
        self.reached, self.right = Counter(), Counter()  # by the place of a draft in its step

    def add(self, drafts, accepted, seconds):
        """Add a step; seconds: of the executor."""
        self.seconds.setdefault(drafts, []).append(seconds)
        self.tokens += 1 + accepted
        self.drafts += drafts
        for place in range(1, drafts + 1):
            self.reached[place] += accepted >= place - 1
            self.right[place] += accepted >= place

    def gains(self, plain):
        """Return the gain of these steps, and of the best depth, at their prices.

        plain: the seconds of a step without drafts of the other engine.
        """
        prices = {drafts: median(seconds) for drafts, seconds in self.seconds.items()}
        steps_s = sum(prices[drafts] * len(seconds) for drafts, seconds in self.seconds.items())
        draft = self.drafting_s / max(self.drafts, 1)
        chance = tokens = best = 1.0
        for place in sorted(self.reached):
            chance *= self.right[place] / max(self.reached[place], 1)
            tokens += chance
            if place in prices:
                best = max(best, tokens * plain / (prices[place] + place * draft))
        return self.tokens * plain / (steps_s + self.drafting_s), best


class Observer:
    """Adds the decode steps of engines to `steps`: of those with drafts to steps[True]."""

    def __init__(self):
        self.steps = {}
        self._seconds = 0.0

    def watch(self):
        """Begin to observe; engines call these functions from their threads, one at a time."""
        run, step, after = NativeExecutor.step, EngineCore.step, EngineCore.after_sending

        def timed_run(executor, arrays):
            began = time.perf_counter()
            outputs = run(executor, arrays)
            self._seconds = time.perf_counter() - began
            return outputs

        def observed_step(core):
            stats = core.stats
            drafts, accepted = stats.draft_tokens, stats.accepted_tokens
            output = step(core)
            drafts, accepted = stats.draft_tokens - drafts, stats.accepted_tokens - accepted
            steps = self.steps.get(core.scheduler.drafter is not None)
            if steps is not None and core.decodes_only and core.scheduler.work.rows == 1:
                steps.add(drafts, accepted, self._seconds)
            return output

        def timed_after(core):
            began = time.perf_counter()
            after(core)
            steps = self.steps.get(core.scheduler.drafter is not None)
            if steps is not None and core.decodes_only and core._proposer is not None:
                steps.drafting_s += time.perf_counter() - began

        NativeExecutor.step = timed_run
        EngineCore.step, EngineCore.after_sending = observed_step, timed_after


observer = Observer()


class Found:
    """The measurements of one text and batch size, with both pairs of engines."""

    def __init__(self):
        self.ratios, self.rates = [], ([], [])
        self.tokens = self.drafts = self.accepted = 0
        self.steps = {drafts: Steps() for drafts in (False, True)}

    def measure(self, plain, drafting, text, batch, args):
        """Add the rounds of one pair of engines."""
        for round_number in range(args.rounds // 2 + 1):
            got = {}
            for llm in (plain, drafting) if round_number % 2 else (drafting, plain):
                asked = text, batch, args.output_tokens, round_number
                if args.again:
                    observer.steps = {}
                    answer(llm, *asked)
                observer.steps = self.steps if round_number else {}
                before = counted(llm)
                got[llm] = answer(llm, *asked)
                self.drafts += counted(llm)[0] - before[0]
                self.accepted += counted(llm)[1] - before[1]
            if got[plain][1] != got[drafting][1]:
                sys.exit(f"bench_drafts: the answers to {text!r} differ")
            self.tokens += sum(map(len, got[plain][1]))
            if round_number:
                pair = got[plain][0], got[drafting][0]
                self.ratios.append(pair[1] / pair[0])
                for samples, rate in zip(self.rates, pair, strict=True):
                    samples.append(rate)

    def record(self, text, batch, args, place):
        """Return the record of all rounds."""
        facts = {
            "plain_tokens_per_s": round(percentile(self.rates[0], 50), 1),
            "drafting_tokens_per_s": round(percentile(self.rates[1], 50), 1),
            "drafts_a_token": round(self.drafts / self.tokens, 3),
            "right": round(self.accepted / max(self.drafts, 1), 3),
        }
        plain, drafting = self.steps.values()
        if batch == 1 and plain.seconds and drafting.seconds:
            gain = median(self.ratios)
            steps, depths = drafting.gains(median(plain.seconds[0]))
            facts["share_of_steps"] = round(gain / steps, 3)
            if drafting.drafting_s:
                facts["share_of_depths"] = round(gain / depths, 3)
        shape = {"text": text, "batch": batch, "output_tokens": args.output_tokens}
        if args.again:
            shape["again"] = True
        return record(
            "drafts_rate",
            "x plain",
            self.ratios,
            place,
            better="more",
            parameters=shape,
            facts=facts,
        )


def counted(llm):
    """Return (draft tokens, accepted draft tokens) of the engine so far."""
    stats = llm._client.stats
    return stats.draft_tokens, stats.accepted_tokens


def engine(args, drafts):
    """Return a new LLM, with drafts or without."""
    if not drafts:
        return LLM(args.model, speculate="off")
    return LLM(args.model, speculate="auto", speculative_config=args.speculative_config)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rounds", type=number(int, 2), default=6)
    parser.add_argument("--output-tokens", type=number(int, 2), default=200)
    parser.add_argument("--batch", type=number(int, 1), nargs="+", default=[1])
    parser.add_argument("--text", nargs="+", choices=TEXTS, default=USUAL)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--speculative-config", type=json.loads)
    args = parser.parse_args(argv)
    observer.watch()
    found = {(batch, text): Found() for batch in args.batch for text in args.text}
    for order in ((False, True), (True, False)):
        with ExitStack() as stack:
            engines = {drafts: stack.enter_context(engine(args, drafts)) for drafts in order}
            for (batch, text), some in found.items():
                some.measure(engines[False], engines[True], text, batch, args)
            config = engines[False].config
    place = Where(host="", isa=config.isa, threads=config.threads, model=config.model)
    for (batch, text), some in found.items():
        print(some.record(text, batch, args, place).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
