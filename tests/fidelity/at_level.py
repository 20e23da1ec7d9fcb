"""Answer the golden prompts with the default model at ISA levels, in this process.

    python -m tests.fidelity.at_level [--model FILE] [--tokens N] [--invariance M,N] [LEVEL ...]

The levels are by default all that this build has and this CPU runs.

At each level: greedy answers must be those of transformers in fp32 (tests/golden) up to the first
token that led the next best by less than MARGIN, because that close a call may go either way. And
they must have the same bits, token by token, when the prompts are computed in small pieces, on
other threads, and together with other requests: 32 in all (with --invariance, the first M tokens,
among N requests in all). Nothing but cpuserve and the model is needed, so it also runs under an
emulator:

    qemu-x86_64-static -cpu Haswell PYTHON -m tests.fidelity.at_level avx2
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.fidelity.passages import NUM_GREEDY, PROMPTS, fingerprint, reference

MODEL = "smollm2:135m"
MARGIN = 0.05  # nats
TOGETHER = 32
# Smaller than the 32 rows and the prompts beside them need, so that prompts are cut.
PIECE = 40


@dataclass(frozen=True)
class Answer:
    """Token ids, and the log probability of each, bit for bit."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def first(self, tokens: int) -> Answer:
        """Its first `tokens` tokens."""
        return Answer(self.ids[:tokens], self.logprobs[:tokens])


def certain(margins: list[float]) -> int:
    """How many tokens precede the first whose margin is below MARGIN."""
    return next((i for i, margin in enumerate(margins) if margin < MARGIN), len(margins))


def answers(model: Path, prompts: list[list[int]], tokens: int, together: bool, **options):
    """The greedy answers, from a new engine; prompts that are not `together` come one by one."""
    from cpuserve import LLM, SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=0, ignore_eos=True)
    sizes = {"max_model_len": 128, "max_num_seqs": TOGETHER}
    with LLM(str(model), **sizes, **options) as llm:
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        found = []
        for batch in batches:
            for result in llm.generate(batch, params, use_tqdm=False):
                ids = tuple(result.outputs[0].token_ids)
                steps = result.outputs[0].logprobs
                chances = (step[token].logprob for step, token in zip(steps, ids, strict=True))
                found.append(Answer(ids, tuple(chances)))
    return found


def golden_ids(model: Path) -> list[list[int]]:
    """The prompts as token ids, which must be those of the reference."""
    from cpuserve.tokenizer.load import load_tokenizer

    tokenizer, _ = load_tokenizer(str(model), None)
    ids = [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROMPTS]
    wanted = [greedy["prompt"] for greedy in reference()["greedy"]]
    assert [fingerprint(prompt) for prompt in ids] == wanted, "the tokenizer differs"
    return ids


def others(count: int) -> list[list[int]]:
    """Prompts of 1 to 40 tokens to keep the golden ones company."""

    def prompt(n: int) -> list[int]:
        return [(i * 37 + n * n * 5) % 40_000 + 100 for i in range(1 + n * 7 % 40)]

    return [prompt(n) for n in range(count)]


def threads_here() -> tuple[str, str]:
    """One CPU, and two where there are two: values of the option `omp_threads_bind`."""
    cpus = sorted(os.sched_getaffinity(0))
    return str(cpus[0]), ",".join(map(str, cpus[:2]))


def check_answers(model: Path, isa: str, tokens: int) -> tuple[int, list[Answer], list[list[int]]]:
    """Compare with the reference; returns how many tokens were compared, answers and prompts."""
    prompts = golden_ids(model)
    one, _ = threads_here()
    alone = answers(model, prompts, tokens, together=False, isa=isa, omp_threads_bind=one)
    compared = 0
    for text, wanted, found in zip(PROMPTS, reference()["greedy"], alone, strict=True):
        n = min(certain(wanted["margins"]), tokens)
        compared += n
        want = tuple(wanted["ids"][:n])
        assert found.ids[:n] == want, f"{isa}: {text!r}: {found.ids[:n]}, not {want}"
    return compared, alone, prompts


def check_batch_invariance(
    model: Path,
    isa: str,
    tokens: int,
    alone: list[Answer],
    prompts: list[list[int]],
    requests: int = TOGETHER,
) -> None:
    """The prompts together with others, in pieces, on other threads, must have the same bits."""
    company = others(requests - len(prompts))
    mixed = [*company[::2], *prompts, *company[1::2]]
    _, two = threads_here()
    first = len(company[::2])
    found = answers(
        model,
        mixed,
        tokens,
        together=True,
        isa=isa,
        omp_threads_bind=two,
        max_num_batched_tokens=PIECE,
    )[first : first + len(prompts)]
    for text, want, got in zip(PROMPTS, alone, found, strict=True):
        assert got == want, f"{isa}: {text!r}: {got} among {requests - 1} others, {want} alone"


def main(argv: list[str]) -> int:
    from cpuserve import _C
    from cpuserve.loader.hub import resolve_model

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=NUM_GREEDY, help="of each answer, at most 16")
    parser.add_argument(
        "--invariance", default=f"{NUM_GREEDY},{TOGETHER}", help="default: %(default)s"
    )
    parser.add_argument("levels", nargs="*", metavar="LEVEL")
    options = parser.parse_args(argv)
    few, requests = (int(number) for number in options.invariance.split(","))
    few = min(few, options.tokens)
    if few < 1 or not len(PROMPTS) < requests <= TOGETHER:
        parser.error(f"--invariance is tokens and from {len(PROMPTS) + 1} to {TOGETHER} requests")
    model = resolve_model(options.model)
    for isa in options.levels or _C.isa_levels():
        compared, alone, prompts = check_answers(model, isa, options.tokens)
        check_batch_invariance(
            model, isa, few, [answer.first(few) for answer in alone], prompts, requests
        )
        print(
            f"{isa}: {compared} tokens of {len(prompts)} prompts are the reference's; "
            f"the first {few} have the same bits among {requests - 1} others, in pieces, on other "
            "threads",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
