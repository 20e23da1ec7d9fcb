"""Send a signal again where Python drops the exception that its handler raised.

Python prints an exception that is raised in a finalizer or a callback, and goes on. A signal that
arrives in one would be lost, so that a server goes on after SIGTERM.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Time for the finalizer to end. If the signal arrives in another one, it is sent once more.
_AGAIN_S = 0.01


@contextmanager
def sent_again(number_of: Callable[[BaseException | None], int | None]) -> Iterator[None]:
    """Send the signals of dropped exceptions again, for as long as this lasts.

    number_of(exception): the signal that it comes from, None for other exceptions.
    """
    before = sys.unraisablehook

    def hook(what: Any) -> None:
        error = what.exc_value
        if number_of(error) is None:
            before(what)
        while (number := number_of(error)) is not None:
            error = None
            try:
                timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
                timer.daemon = True
                timer.start()
            except BaseException as other:  # the next signal, in this function
                if number_of(other) is None:
                    raise
                error = other

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
