"""A scheduler, its caches and its model, made from options that hypothesis draws."""

import hashlib
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize

from cpuserve.config.cache_groups import STATES_OF_ONE, CacheUse
from cpuserve.core.admission import Limits
from cpuserve.core.kv.block_file import SEED_BYTES
from cpuserve.core.kv.cache_folder import claim
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.offload import Offload
from cpuserve.core.kv.tier import SwapSpace, TierNeeds
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from tests.helpers.drafting import make_drafter
from tests.helpers.fake_executor import VOCAB, FakeModel, ModelBlocks, stored, widest

EOS = frozenset(range(0, VOCAB, 40))


def sha256(data):
    return hashlib.sha256(data).digest()


def weak(data):
    """Return one of few values, so that keys collide often; no seed: the same in every run."""
    return bytes([sha256(data[32:] if 32 <= len(data) <= 40 else data)[0] % 5])


# Under weak(), the first has the same root as no salt at all, the second another.
SALTS = [
    next(
        s for s in map(str, range(99)) if (weak(bytes(32) + s.encode()) == weak(bytes(32))) == same
    )
    for same in (True, False)
]

# Prompts that share beginnings: slices of one text, changed at one place or not.
TEXT = [(7 * i) % VOCAB for i in range(50)]
PROMPTS = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=50),
    st.integers(1, 50).map(lambda n: TEXT[:n]),
    st.tuples(st.integers(2, 50), st.integers(0, 49), st.integers(0, 9)).map(
        lambda t: [*TEXT[: min(t[1], t[0] - 1)], t[2], *TEXT[min(t[1], t[0] - 1) + 1 : t[0]]]
    ),
)


def tokens_of(data, group):
    """The content of a block of `group` without what tells its group."""
    return (np.frombuffer(data, np.int32) - stored(0, group)).tobytes()


class WrittenDisk(DiskCache):
    """Writes each file before `put` returns, so that every run has the same files."""

    def put(self, entry, group, data, wait_s=0.0):
        taken = super().put(entry, group, data, 5.0)
        while self._pending:
            time.sleep(1e-5)
        return taken


class SchedulerUnderTest(RuleBasedStateMachine):
    """The engine's parts, and what became of the requests."""

    @initialize(
        num_blocks=st.integers(4, 30),
        block_size=st.sampled_from([1, 2, 4, 4, 32]),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 40),
        digest=st.sampled_from([sha256, weak]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        itl_target_s=st.sampled_from([0.0, 0.05]),
        threshold=st.sampled_from([0, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        swap=st.sampled_from([None, 1, 5, 100]),
        disk_bytes=st.sampled_from([None, 1 << 20, 1 << 20, 5000]),
        restore_s=st.sampled_from([0.0, 1e-3, 0.02, 0.5]),
        moving_s=st.sampled_from([1.0, 1e-9]),
        windows=st.sampled_from(
            [(0,), (0,), (1,), (3,), (6,), (33,), (0, 5), (4, 0, 4), (9, 3), (0, 0), (0, 1)]
        ),
        drafts=st.sampled_from([None, (1, 1, 1), (3, 1, 2), (5, 2, 4), (12, 1, 3)]),
        snapshots=st.sampled_from([None, None, 0, 1, 5, 40]),
    )
    def start(self, **options):
        self.options = options
        self.windows = options["windows"]
        self.watching = {}
        self.window = widest(self.windows)
        self.directory = tempfile.TemporaryDirectory(prefix="cpuserve-")
        # Files have no parents to compare, only their names: those may not collide.
        if options["disk_bytes"] is not None:
            options["digest"] = sha256
            (claim(Path(self.directory.name)) / "seed").write_bytes(bytes(SEED_BYTES))
        self.added: dict[int, Request] = {}
        self.aborted: set[int] = set()
        self.finished: dict[int, str] = {}
        self.outputs: dict[int, list[int]] = {}
        self.scored: dict[int, list] = {}
        self.start_engine()

    def start_engine(self):
        options = self.options
        num_blocks, block_size = options["num_blocks"], options["block_size"]
        max_num_seqs, budget = options["max_num_seqs"], options["budget"]
        # one block more, which stands for those that have left the window and is never written
        snapshots, chunk = options["snapshots"], max(1, block_size // 2)
        num_states = 0 if snapshots is None else snapshots + STATES_OF_ONE * max_num_seqs
        self.model = FakeModel(
            num_blocks + 1, block_size, max_num_seqs, budget, self.windows, num_states, chunk
        )
        self.kv = KvManager(
            num_blocks,
            block_size,
            prefix_caching=options["prefix_caching"],
            digest=options["digest"],
            offload=self.make_offload(),
            use=CacheUse(self.windows, budget, block_size),
            num_states=num_states,
            state_chunk=chunk,
        )
        self.limits = Limits(60, self.kv.use.most_tokens(num_blocks, 60), VOCAB)
        self.scheduler = Scheduler(
            self.kv,
            self.model,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            itl_target_s=options["itl_target_s"],
            long_prefill_token_threshold=options["threshold"],
            policy=options["policy"],
            moving_s=options["moving_s"],
            drafter=make_drafter(self.kv, *options["drafts"]) if options["drafts"] else None,
        )
        for where in ("swap", "disk"):
            self.scheduler.cost.restore_s[where] = options["restore_s"]
            self.scheduler.cost.restore_s[f"{where} state"] = 2 * options["restore_s"]

    def make_offload(self):
        swap, disk_bytes = self.options["swap"], self.options["disk_bytes"]
        if swap is None and disk_bytes is None:
            return None
        blocks, tiers = ModelBlocks(self.model), []
        if swap is not None:
            tiers.append(SwapSpace(swap * max(blocks.sizes), blocks.sizes))
        if disk_bytes is not None:
            where = Path(self.directory.name)
            needs = TierNeeds(blocks.sizes, bytes(32))
            tiers.append(WrittenDisk(where, needs, disk_bytes, 1 << 20))
        return Offload(blocks, tiers)

    @property
    def num_moved(self):
        """Blocks that have been moved between offload."""
        offload = self.kv.offload
        return offload.num_restored + offload.num_saved if offload is not None else 0

    def tier(self, name):
        """The tier of that name, or None."""
        tiers = self.kv.offload.tiers if self.kv.offload is not None else ()
        return next((tier for tier in tiers if tier.name == name), None)

    @property
    def disk(self):
        """The disk tier, or None."""
        return self.tier("disk")
