"""Send a signal again where Python drops the exception that its handler raised.

Python prints an exception that is raised in a finalizer or a callback, and continues.
A signal that arrives during such a call would be lost, and a server would continue after SIGTERM.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Seconds from a dropped exception to the next signal; the finalizer can end meanwhile.
# If the signal arrives in another finalizer, it is sent once more.
_AGAIN_S = 0.01


@contextmanager
def sent_again(number_of: Callable[[BaseException | None], int | None]) -> Iterator[None]:
    """While the `with` block runs, send a signal again if Python drops its handler's exception.

    An exception that Python wraps in another is raised as itself.

    number_of(exception): returns the number of the signal that raises this exception;
    None if a handler has not raised it.
    """
    before = sys.unraisablehook
    timer: threading.Timer | None = None  # the timer that will send the signal

    def send(number: int) -> None:
        nonlocal timer
        timer = None  # before os.kill, as the handler may run in it and lose its exception again
        os.kill(os.getpid(), number)

    def hook(what: Any) -> None:
        nonlocal timer
        error = what.exc_value
        if number_of(error) is None:
            before(what)
        while (number := number_of(error)) is not None:
            error = None
            if timer is not None:  # a second signal would arrive while the first one is handled
                break
            try:
                timer = threading.Timer(_AGAIN_S, send, (number,))
                timer.daemon = True
                timer.start()
            except BaseException as other:  # the handler of another signal has raised this
                if number_of(other) is None:
                    raise
                if timer is not None and not timer.is_alive():
                    timer = None
                error = other

    sys.unraisablehook = hook
    try:
        yield
    except RuntimeError as error:  # Python 3.11 wraps exceptions of __set_name__, as in imports
        if error.__cause__ is None or number_of(error.__cause__) is None:
            raise
        raise error.__cause__ from None
    finally:
        sys.unraisablehook = before
        if timer is not None:
            timer.cancel()
