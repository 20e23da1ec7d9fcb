"""GrammarProposer: jumps and drafts of grammars come as those of every other proposer."""

import ast
from pathlib import Path
from types import SimpleNamespace

import cpuserve
from cpuserve.engine.grammars.messages import Guessed
from cpuserve.engine.grammars.proposer import GrammarProposer

ROOT = Path(cpuserve.__file__).parent
PROPOSERS = ("core/speculation/", "engine/speculation/", "engine/grammars/proposer.py")
WRITTEN = {"drafts", "chances", "most_drafts"}


def is_written(node):
    """Whether `node` stores an attribute about drafts of what is called `request`."""
    if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
        return False
    owner = node.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return node.attr in WRITTEN and name == "request"


def test_only_proposers_write_the_drafts_of_a_request():
    writers = {
        path.relative_to(ROOT).as_posix()
        for package in ("core", "engine")
        for path in (ROOT / package).rglob("*.py")
        if any(is_written(node) for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    }
    assert "engine/grammars/proposer.py" in writers
    assert [name for name in writers if not name.startswith(PROPOSERS)] == []


class Row(SimpleNamespace):
    """A running request with drafts of n-grams."""

    def __init__(self, guess, *, masked=True, sure=0):
        super().__init__(guess=guess, masked=masked, sure=sure, drafts=[7, 8], chances=[0.5, 0.4])
        self.jumped = []

    def jump(self, tokens):
        self.jumped += tokens


class Grammars:
    def __init__(self):
        self.rooms = []

    def take_guess(self, request, room):
        self.rooms.append(room)
        return request.guess


def test_jumps_of_all_requests_share_the_tokens_of_a_step():
    grammars = Grammars()
    jumping = Row(Guessed([1, 2, 3], [7, 9], [False, True]))
    without_masks, unchanged, free = Row(Guessed([], [], [])), Row(None, sure=2), Row(None)
    free.masked = False
    requests = [jumping, without_masks, unchanged, free]
    GrammarProposer(grammars, most_tokens=20).propose(requests, None)
    assert grammars.rooms == [20 - 4 - 2, 11, 11]
    assert (jumping.jumped, jumping.drafts) == ([1, 2, 3], [7, 9])
    assert jumping.chances == [1.0, 1.0]  # the chances of n-grams were those of the jump
    assert (without_masks.drafts, without_masks.chances) == ([], [])
    assert unchanged.drafts == free.drafts == [7, 8]
