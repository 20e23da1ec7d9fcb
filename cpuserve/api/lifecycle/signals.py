"""The signals that stop the server."""

from __future__ import annotations

import signal

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
