"""The help of the command line: what each command is for, one example that parses, and every default."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path
from shutil import which

import pytest

from kvloom.cli import _parser, main
from kvloom.command_help import EXAMPLES, GROUPS, commands_of

LEAVES = {
    name: command
    for name, command, _ in commands_of(_parser())
    if not any(isinstance(x, argparse._SubParsersAction) for x in command._actions)
}


@pytest.mark.parametrize("name", LEAVES)
def test_each_command_has_a_sentence_and_an_example_that_parses(name: str) -> None:
    text = LEAVES[name].format_help()
    assert LEAVES[name].description and f"example: {EXAMPLES[name]}" in text
    words = shlex.split(EXAMPLES[name].split(">>")[0])
    assert words[0] == "kvloom" and " ".join(words[1:]).startswith(name)
    args = _parser().parse_args(words[1:])
    assert callable(args.run)


@pytest.mark.parametrize("name", LEAVES)
def test_each_option_says_what_it_means_and_its_default(name: str) -> None:
    for action in LEAVES[name]._actions:
        if action.help == argparse.SUPPRESS:
            continue
        said = LEAVES[name]._get_formatter()._get_help_string(action) or ""
        assert action.help, action.dest
        if not isinstance(action.default, (bool, list)) and action.default not in (
            None,
            "",
            argparse.SUPPRESS,
        ):
            assert "default" in said, action.dest


def test_help_lists_each_command_once_by_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    names = [name for name, _, _ in commands_of(_parser()) if " " not in name]
    assert sorted(lines) == sorted(names) == sorted(name for group in GROUPS.values() for name in group)
    assert {*EXAMPLES} == {*LEAVES}


@pytest.mark.process
def test_bash_completes_commands_options_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bash = which("bash")
    assert bash
    (tmp_path / "config.json").write_text("{}")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "kvloom.bash").write_text(capsys.readouterr().out)

    def completed(*words: str) -> list[str]:
        ask = (
            f"source kvloom.bash; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
            'COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}; '
            '_shtab_kvloom; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        run = subprocess.run([bash, "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
        return run.stdout.split()

    assert completed("kvloom", "sup") == ["supports"]
    assert completed("kvloom", "be") == []  # what is gone is not offered
    assert "--context" in completed("kvloom", "plan", "--con")
    assert completed("kvloom", "plan", "--model", "conf") == ["config.json"]
    assert "lru" in completed("kvloom", "serve", "--policy", "")
