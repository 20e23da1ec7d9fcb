"""Downloads for tests, which an index or a proxy may refuse once."""

import time

from tests.helpers.skips import in_ci

TRIES = 3
PAUSE_S = 5.0


def tried(fetch, error):
    """Return fetch(). In CI, which skips no test for want of a file, try again after an `error`."""
    for _ in range(TRIES - 1 if in_ci() else 0):
        try:
            return fetch()
        except error:
            time.sleep(PAUSE_S)
    return fetch()
