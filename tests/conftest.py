"""Makes `tests.helpers` importable for plain `pytest` without putting the checkout on the path.

The tests are to find the installed package with its compiled extension; the sources beside them
have none.
"""

import sys
import types
from pathlib import Path

if "tests" not in sys.modules:
    package = types.ModuleType("tests")
    package.__path__ = [str(Path(__file__).parent)]
    sys.modules["tests"] = package
