"""Tokenize without the lock of the interpreter (GIL), on threads of low priority.

Only the batch calls of the library tokenizers release the GIL. A batch of one text runs on the
calling thread, and a batch of two on threads of the library. These never hold the GIL, so their
priority can be low. The calling thread keeps its own: if it were low, streams would wait for the
GIL as long as the engine keeps the cores busy.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from cpuserve.base.log import get_logger
from cpuserve.config.env import for_library, settle

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Core

# On a core that the engine keeps busy, a thread with this nice value gets a tenth of the time
# (Linux weights are 110 for nice 10 and 1,024 for nice 0). A token takes 0.5 to 1 us to tokenize,
# and a hundred times as long to compute, so a prompt is delayed by a tenth at most.
NICE = 10

LONG_CHARS = 4096  # shorter texts take less time than a switch to another thread

# The library reads this variable for each batch, and runs on the calling thread if it is one of
# these. Many images set it, because a process that forks is warned otherwise; a server never forks.
_PARALLEL = "TOKENIZERS_PARALLELISM"
_OFF = ("off", "false", "f", "no", "n", "0")

_started = threading.Event()
log = get_logger("tokenizer")


def yield_to_streams(count: int) -> None:
    """Start the threads of the library with low priority, where the system can do that.

    They are started once in a process, with the priority of the thread that needs them first.

    count: how many; RAYON_NUM_THREADS goes before. The library gives a text to a thread that is
      free, in no turns: with one thread for each CPU, two large texts on two CPUs kept all others
      waiting. So there should be as many as texts that are encoded at the same time.
    """
    # On other systems, threads have no priority of their own.
    if sys.platform == "linux" and not _started.is_set():
        given = settle(_PARALLEL, "true")
        if given is not None and given.lower() in _OFF:
            why = "long texts need threads of low priority"
            log.info("env %s=%s is ignored: %s", _PARALLEL, given, why)
        thread = threading.Thread(target=_start, args=(count,))
        thread.start()
        thread.join()
        _started.set()


def _start(count: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it
            lower = os.getpriority(os.PRIO_PROCESS, 0) + NICE
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), lower)
    with for_library("RAYON_NUM_THREADS", str(count)):
        Tokenizer(BPE()).encode_batch_fast(["", ""])


def encoded(
    core: Core, text: str | tuple[str, str], *, add_special_tokens: bool, places: bool = False
) -> Encoding:
    """Return the Encoding of a text, or of a pair of texts, without holding the GIL.

    Long ones are encoded on the threads that `yield_to_streams` has started.

    places: whether its tokens have their places in the text.
    """
    encode = core.encode_batch if places else core.encode_batch_fast
    size = len(text) if isinstance(text, str) else sum(map(len, text))
    texts = [text, ""] if size > LONG_CHARS and _started.is_set() else [text]
    return encode(texts, add_special_tokens=add_special_tokens)[0]
