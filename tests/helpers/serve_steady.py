"""`python -m tests.helpers.serve_steady ...`: cpuserve, whose engines always start again at once.

An engine that dies again and again within a minute starts again after longer and longer waits.
Tests that kill engines every few seconds would mostly wait, so each death counts as the first one.
"""

import sys

from cpuserve.cli.main import main
from cpuserve.engine.replicas import RestartPolicy

if __name__ == "__main__":
    RestartPolicy.delay_s = lambda _policy, _deaths: 0.0
    sys.exit(main())
