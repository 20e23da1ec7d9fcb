"""Programs for edits: they run, no line comes twice, and all functions use the renamed class."""

import random

from cpuserve.bench.programs import NAMES, program, rename


def test_a_program_has_300_lines_that_are_all_different():
    text = program(random.Random(1), "Ledger")
    lines = [line for line in text.splitlines() if line.strip()]
    assert 270 < len(text.splitlines()) < 330
    assert len(set(lines)) == len(lines)
    functions = [line for line in lines if line.startswith("def ")]
    assert len(functions) == 33
    assert all("ledger: Ledger" in line for line in functions)


def test_a_program_runs_with_either_name():
    for name in NAMES:
        scope = {"__name__": "program"}
        text = program(random.Random(2), name)
        exec(compile(text, "program", "exec"), scope)
        one = next(n.removeprefix("add_") for n in scope if n.startswith("add_"))
        kept = scope[f"add_{one}"](scope[name]("Mara"), "first", 99)
        total = next(scope[n] for n in scope if n.startswith("total_"))
        assert total(kept) == 99.0
        assert total(scope[f"remove_{one}"](kept, "first")) == 0


def test_a_request_has_two_names_and_another_program_for_each_seed():
    asked = [rename(random.Random(n)) for n in range(8)]
    assert asked[3] == rename(random.Random(3))
    assert len({text.partition("```")[2] for text in asked}) == 8
    for text in asked:
        known, new = (word for word in text.split(" in this")[0].split() if word in NAMES)
        assert known != new
        assert f"class {known}:" in text
        assert text.count(new) == 1
