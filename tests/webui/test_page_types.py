"""The modules of the chat page have the types that their comments say (JSDoc)."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers.npm import npm_folder
from tests.helpers.patience import PATIENCE_S

FOLDER = Path(__file__).parents[2] / "cpuserve" / "webui"
OPTIONS = [
    *("--noEmit", "--allowJs", "--checkJs", "--strict", "--noUnusedLocals", "--noUnusedParameters"),
    *("--target", "es2024", "--lib", "es2024,dom,dom.iterable"),
    *("--module", "es2022", "--moduleResolution", "bundler"),
]

pytestmark = pytest.mark.network


@pytest.mark.deep
def test_the_modules_have_their_types():
    compiler = npm_folder("typescript@5.9.3") / "node_modules/typescript/bin/tsc"
    files = map(str, sorted(FOLDER.glob("*.js")))
    done = subprocess.run(
        ["node", compiler, *OPTIONS, *files], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, "")
