"""Liveness: detect from the messages of an engine whether it makes progress while it has work.

Short steps show by their outputs that the engine works. If nothing has arrived for a moment,
the front end sends a Ping. A thread of the engine process replies, even during a step, and says
whether the engine has advanced since the last Ping. A long step is therefore not taken for a hang.
A stopped process does not reply, and the reply during a stuck step says that it has not advanced.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.base.log import is_record


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The limits after which an engine counts as hung; all times are in seconds.

    tick_s: time between two checks.
    suspect_s: after this time without a sign of life,
      the engine gets no new requests until it sends one.
    end_s: after this time, the engine is killed.
    """

    tick_s: float = 1.0
    suspect_s: float = 10.0
    end_s: float = 60.0


class Liveness:
    """Measures for how long an engine has been silent although it has work."""

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._heard = False  # whether a message has arrived since the last tick
        self._asked = False  # whether the engine has not replied to a Ping yet
        self._stuck = False  # whether the last reply said that the engine has not advanced
        self.silent_s = 0.0

    def hear(self) -> None:
        """Note a message that only a working engine sends."""
        self._heard = True

    def pong(self, advanced: bool) -> None:
        """Note the reply to a Ping."""
        self._asked, self._stuck = False, not advanced
        if advanced:
            self.hear()

    def open(self, has_work: bool) -> bool:
        """Whether a sign of life is expected, so that ticks have to go on."""
        return has_work or self._asked or self._stuck

    def tick(self, elapsed_s: float, has_work: bool) -> bool:
        """Count the time since the last tick; return True if a Ping should be sent.

        If elapsed_s is much more than tick_s, the front end itself did not run, and a reply
        of the engine may not have been read. elapsed_s therefore counts as at most two ticks.
        """
        if self._heard or not self.open(has_work):
            self._heard = self._stuck = False
            self.silent_s = 0.0
            return False
        self.silent_s += min(elapsed_s, 2 * self._limits.tick_s)
        ask, self._asked = not self._asked, True
        return ask

    @property
    def hung(self) -> bool:
        """Whether there has been no sign of life for suspect_s."""
        return self.silent_s >= self._limits.suspect_s

    @property
    def lost(self) -> bool:
        """Whether there has been no sign of life for end_s."""
        return self.silent_s >= self._limits.end_s

    @property
    def symptom(self) -> str:
        """The fault, as the end of a sentence that begins with "the engine"."""
        what = "has made no progress" if self._stuck else "has not answered"
        return f"{what} for {self.silent_s:.3g} s although it has work"


CRASH = "Fatal Python error: "  # the beginning of a crash report of faulthandler
ABORT = CRASH + "Aborted"
# A process writes the reason just before it ends; an older line has another subject.
RECENT_S = 2.0


class LastWords:
    """Keeps the line that best says why a process has ended; times are in seconds.

    Log records are not kept: a warning, or a failure that the process survived, is not the cause.
    Indented lines are not kept, because they belong to a traceback.
    Of a crash report, only the first line is kept.
    If a line before the report of an abort has the reason, that line is kept instead.
    """

    def __init__(self) -> None:
        self._line = ""
        self._at = 0.0
        self._is_report = False

    def hear(self, line: str, now: float) -> None:
        """Note a line that the process has just written."""
        if now - self._at > RECENT_S:
            self._line, self._is_report = "", False
        if self._is_report or not line.strip() or line[0].isspace() or is_record(line):
            return
        self._is_report = line.startswith(CRASH)
        if line.rstrip() != ABORT or not self._line:
            self._line = line.rstrip()
        self._at = now

    def at(self, end: float) -> str:
        """Return the line of a process that ended at the time `end`; "" if there is none."""
        return self._line if end - self._at <= RECENT_S else ""
