"""`cpuserve completion`: shells complete the commands and flags that the parser has."""

import shutil
import subprocess

import pytest

from cpuserve.cli.completion import bash_script, command_tree, fish_script, zsh_script
from cpuserve.cli.main import build_parser, main


@pytest.fixture(scope="module")
def tree():
    return command_tree("cpuserve", "", build_parser())


def completed(script, *words):
    """Return what bash offers for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _cpuserve; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{code}"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["cpuserve", "ser"], ["serve"]),
        (["cpuserve", "c"], ["chat", "completion", "complete", "config"]),
        (["cpuserve", "serve", "--max-model"], ["--max-model-len"]),
        (["cpuserve", "serve", "MODEL", "--port", "1", "--max-model"], ["--max-model-len"]),
        (["cpuserve", "bench", "roof"], ["roofline"]),
        (["cpuserve", "bench", "serve", "--burst"], ["--burstiness"]),
        (["cpuserve", "completion", "--burst"], []),
    ],
)
def test_bash_completes(tree, words, offered):
    assert sorted(completed(bash_script(tree), *words)) == sorted(offered)


@pytest.mark.parametrize("make", [zsh_script, fish_script], ids=["zsh", "fish"])
def test_other_shells_get_every_command_and_flag(tree, make):
    script = make(tree)
    for command in tree.commands:
        assert command.name in script
        for flag in command.flags:
            assert flag.name in script or f"-l {flag.name[2:]} " in script or (
                f"{flag.name[1:]} -d" in script
            )  # fmt: skip
    shell = shutil.which(make.__name__.partition("_")[0])
    if shell is not None:
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_command_prints_the_script(capsys, tree):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == bash_script(tree) + "\n"
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
