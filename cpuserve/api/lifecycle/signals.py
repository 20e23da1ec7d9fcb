"""The signals that stop the server, and SIGHUP, which may reload --api-key-file instead."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# All of these signals drain the server. A terminal sends SIGHUP when it closes. Ctrl-\ sends
# SIGQUIT, and so do supervisors that stop programs as nginx is stopped.
# Without handlers, these signals would kill the server and its streams.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server.

    SIGHUP and SIGQUIT are left out if they were ignored when the server was started,
    as nohup does with SIGHUP.
    """
    optional = (signal.SIGHUP, signal.SIGQUIT)
    return [
        number
        for number in _STOP_SIGNALS
        if number not in optional or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextmanager
def hangup_of_manager(environ: Mapping[str, str]) -> Iterator[None]:
    """Ignore SIGHUP until the end of the `with` block if a service manager runs the server.

    `systemctl reload` sends SIGHUP (ExecReload), which must not stop a server that loads its model.
    """
    if not environ.get("NOTIFY_SOCKET"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def reload_signals() -> list[signal.Signals]:
    """Return the signals that reload --api-key-file: SIGHUP, unless it stops the server."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGHUP] if ignored else []
