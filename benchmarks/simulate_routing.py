#!/usr/bin/env python3
"""Simulate conversations with many servers, to compare policies of routing.

usage: simulate_routing.py [--replicas 2 8 32 200] [--seconds 240] [--rate 0.05] [--seed 1]

Every server has the real scheduler and prefix cache of cpuserve. Only the steps are modelled:
their time follows from the work of the step and a roofline (`Machine`). The policies are

  round_robin   each request goes to the next server
  least_loaded  to the server with the least load (nginx: least_conn)
  session       all requests of a conversation go to one server, by a hash (nginx: hash)
  prefix        the router of --data-parallel-size (cpuserve/engine/router.py)

Conversations arrive at random (--rate for each server and second). Each begins with one of several
system prompts, and has a few turns. The prompt of a turn has all earlier messages. A user reads
the response before the next turn. Turns that arrive in the first third of the time are not counted.

The columns: turns; the share of prompt tokens that were in the prefix cache; median, 95th
and 99th percentile of the time to the first token in seconds; the 95th percentile of the mean time
between two tokens of a response in ms; the prompt tokens that a server computes each second,
as the mean of all servers; and the number of the busiest server divided by this mean.
"""

import argparse
import heapq
import itertools
import random
import sys
import zlib
from collections import deque
from dataclasses import dataclass, field

from cpuserve.bench.schema import percentile
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.step import RowResult
from cpuserve.engine.router import SEQUENCE_TOKENS, Router
from cpuserve.sampling.params import SamplingParams

BLOCK = 32
VOCAB = 32_000
POLICIES = ("round_robin", "least_loaded", "session", "prefix")


@dataclass(frozen=True)
class Machine:
    """A server with 16 cores and a model of 8B weights in int8; the times follow from its limits.

    bandwidth: bytes/s.
    weight_bytes: the bytes of weights, which a step reads once.
    key_bytes: the bytes of the keys and values of one token.
    token_s, pair_s: seconds for a prompt token, and for a pair of query and key.
    """

    bandwidth: float = 200e9
    weight_bytes: float = 8e9
    key_bytes: float = 131e3
    token_s: float = 1 / 1200
    pair_s: float = 2.6e-7
    cache_tokens: int = 65_536

    def seconds(self, work):
        """Return the seconds that a step with this StepWork takes."""
        read = self.weight_bytes + self.key_bytes * work.keys
        # Prompts are computed while weights are read; the longer time is the time of a step.
        return max(read / self.bandwidth, self.token_s * work.tokens) + self.pair_s * work.pairs


@dataclass(frozen=True)
class Workload:
    """Conversations; lengths are tokens, drawn from exponential distributions with these means."""

    system_prompts: int = 20
    system_tokens: int = 1500
    turns: tuple = (3, 9)
    user_tokens: float = 200
    response_tokens: float = 120
    reading_s: float = 8


class NoSlots:
    """The SlotHost of a scheduler without an executor: it has no sampler state."""

    def admit(self, *_):
        """Do nothing: there is no sampler state to create."""

    def release(self, _slot):
        """Do nothing: there is no sampler state to free."""


@dataclass(eq=False)
class Conversation:
    """A conversation: the tokens of all messages so far."""

    number: int
    turns: int
    tokens: list
    chance: random.Random


@dataclass(eq=False)
class Turn:
    """A request of a conversation, with its times."""

    conversation: Conversation
    prompt_tokens: int
    arrival: float
    cached: int = 0
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0


@dataclass(eq=False)
class Server:
    """A replica: a scheduler, requests that arrived during its step, and the step in progress.

    computed: prompt tokens that it computed in the time that counts.
    """

    machine: Machine
    scheduler: Scheduler = None
    inbox: deque = field(default_factory=deque)
    turns: dict = field(default_factory=dict)
    batch: object = None
    computed: int = 0

    def __post_init__(self):
        kv = KvManager(self.machine.cache_tokens // BLOCK, BLOCK)
        self.scheduler = Scheduler(
            kv, NoSlots(), max_num_seqs=64, max_num_batched_tokens=2048, itl_target_s=0.05
        )

    @property
    def load(self):
        """The load as in engine/replicas.py: sequences, and the prompt tokens still to compute."""
        requests = [*self.scheduler.requests.values(), *self.inbox]
        rest = sum(max(0, r.num_prompt - r.num_computed) for r in requests)
        return len(requests) + rest / SEQUENCE_TOKENS

    def begin(self):
        """Start a step and return its time, or None if there is nothing to do."""
        while self.inbox:
            self.scheduler.add(self.inbox.popleft())
        if not self.scheduler.has_work:
            return None
        self.batch = self.scheduler.schedule()
        if not self.batch.chunks:
            msg = "the scheduler has work, but schedules nothing"
            raise RuntimeError(msg)
        seconds = self.machine.seconds(self.scheduler.work)
        self.scheduler.cost.observe(self.scheduler.work, seconds)
        return seconds

    def end(self, now):
        """Finish the step at `now`; return the turns that have ended with it."""
        results = [
            RowResult(zlib.crc32(b"%d %d" % (chunk.slot, chunk.start + row.index)) % VOCAB)
            for chunk in self.batch.chunks
            for row in chunk.rows
        ]
        self.batch, ended = None, []
        for delta in self.scheduler.update(results):
            turn = self.turns[delta.request.id]
            if delta.error:
                raise RuntimeError(delta.error)
            if delta.tokens and not turn.tokens:
                turn.first, turn.cached = now, delta.request.cached_tokens
            turn.tokens += len(delta.tokens)
            if delta.finish:
                turn.end = now
                turn.conversation.tokens = list(delta.request.token_ids)
                ended.append(self.turns.pop(delta.request.id))
        return ended


class Simulation:
    """Servers, conversations and one policy; `run` returns the turns that were counted."""

    def __init__(self, policy, replicas, rate, seconds, seed=1, machine=None, workload=None):
        self.policy, self.seconds = policy, seconds
        self.machine, self.workload = machine or Machine(), workload or Workload()
        self.servers = [Server(self.machine) for _ in range(replicas)]
        self.router = Router(replicas, BLOCK)
        chance = random.Random(seed)
        self.systems = [
            self.text(chance, self.workload.system_tokens)
            for _ in range(self.workload.system_prompts)
        ]
        self.turns, self.events, self.numbers = [], [], itertools.count()
        now = 0.0
        for number in itertools.count():
            now += chance.expovariate(rate * replicas)
            if now > seconds:
                break
            own = random.Random(seed * 1_000_003 + number)  # the same for every policy
            system = self.systems[own.randrange(len(self.systems))]
            turns = own.randint(*self.workload.turns)
            self.at(now, self.arrive, Conversation(number, turns, list(system), own))

    @staticmethod
    def text(chance, count):
        return [chance.randrange(VOCAB) for _ in range(count)]

    def at(self, time, call, *arguments):
        heapq.heappush(self.events, (time, next(self.numbers), call, arguments))

    def run(self):
        """Simulate until every conversation that began has ended."""
        while self.events:
            now, _, call, arguments = heapq.heappop(self.events)
            call(now, *arguments)
        return [turn for turn in self.turns if self.counts(turn.arrival)]

    def counts(self, time):
        """Return whether, at `time`, caches and queues are filled and conversations still begin."""
        return self.seconds / 3 <= time <= self.seconds

    def arrive(self, now, conversation):
        """A turn arrives: extend the conversation, and send the prompt to a server."""
        own, work = conversation.chance, self.workload
        new = 1 + int(own.expovariate(1 / work.user_tokens))
        conversation.tokens += self.text(own, new)
        max_tokens = 1 + int(own.expovariate(1 / work.response_tokens))
        conversation.turns -= 1
        number = len(self.turns)
        turn = Turn(conversation, len(conversation.tokens), now)
        self.turns.append(turn)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(number, list(conversation.tokens), params, max_tokens, seed=number)
        server = self.servers[self.choose(conversation, request.token_ids)]
        server.turns[number] = turn
        server.inbox.append(request)
        if server.batch is None:
            self.step(now, server)

    def choose(self, conversation, prompt):
        """Return the number of the server for a prompt."""
        if self.policy == "round_robin":
            return (len(self.turns) - 1) % len(self.servers)
        if self.policy == "session":
            return zlib.crc32(b"%d" % conversation.number) % len(self.servers)
        loads = [server.load for server in self.servers]
        if self.policy == "prefix":
            return self.router.choose(prompt, loads)
        idlest = [i for i, load in enumerate(loads) if load == min(loads)]
        return idlest[len(self.turns) % len(idlest)]

    def step(self, now, server):
        """Start the next step of a server, if it has work."""
        seconds = server.begin()
        if seconds is not None:
            server.computed += server.scheduler.work.tokens * self.counts(now)
            self.at(now + seconds, self.finish, server)

    def finish(self, now, server):
        """A step ends: users read finished responses, and the next step begins."""
        for turn in server.end(now):
            conversation = turn.conversation
            # No user writes a further turn after the simulated time.
            if conversation.turns and now < self.seconds:
                pause = conversation.chance.expovariate(1 / self.workload.reading_s)
                self.at(now + pause, self.arrive, conversation)
        self.step(now, server)


def summary(simulation, turns):
    """Return the columns of the table for one policy."""
    first = [turn.first - turn.arrival for turn in turns]
    gaps = [(t.end - t.first) / (t.tokens - 1) for t in turns if t.tokens > 1]
    computed = [server.computed for server in simulation.servers]
    mean = sum(computed) / len(computed)
    return {
        "requests": len(turns),
        "cached": sum(t.cached for t in turns) / sum(t.prompt_tokens for t in turns),
        "ttft_50": percentile(first, 50),
        "ttft_95": percentile(first, 95),
        "ttft_99": percentile(first, 99),
        "itl_95_ms": 1e3 * percentile(gaps, 95),
        "computed": mean / (simulation.seconds * 2 / 3),
        "most": max(computed) / mean,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 32, 200])
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    print(
        "| servers | policy | turns | cached | TTFT p50 | p95 | p99 | ITL p95 | computed | most |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for replicas in flags.replicas:
        for policy in POLICIES:
            simulation = Simulation(policy, replicas, flags.rate, flags.seconds, flags.seed)
            got = summary(simulation, simulation.run())
            print(
                f"| {replicas} | {policy} | {got['requests']} | {100 * got['cached']:.0f} % "
                f"| {got['ttft_50']:.2f} s | {got['ttft_95']:.2f} s | {got['ttft_99']:.2f} s "
                f"| {got['itl_95_ms']:.0f} ms | {got['computed']:.0f} "
                f"| {got['most']:.2f} x |",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
