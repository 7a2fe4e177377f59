"""What ``kvloom --help`` says: commands by what they are for, an example of each, and every default.

The parsers of commands say what their options mean. ``complete`` adds the rest to all of them in one place.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

GROUPS: Final = {
    "try": ("demo", "generate"),
    "answer requests": ("serve", "check-answers"),
    "decide": ("plan", "supports", "quality", "isolation", "simulate"),
    "look inside": ("store", "trace", "view", "info"),
    "exchange": ("layouts", "convert", "carry", "conform"),
    "this shell": ("completion",),
}
"""Commands by what they are for."""

EXAMPLES: Final = {
    "demo": "kvloom demo --max-new-tokens 32",
    "generate": "kvloom generate --prompt-file notes.txt --kv int8 --model path/to/model",
    "serve": "kvloom serve path/to/model --kv int8 --store ./pages --drafts",
    "check-answers": "kvloom check-answers --url http://127.0.0.1:8000/v1 --requests 64 --clients 8",
    "plan": "kvloom plan --model path/to/model --memory 24GB --context 32768",
    "supports": "kvloom supports --model path/to/model",
    "quality": "kvloom quality --model path/to/model --text notes.txt --kv int8 --kv int4 --plot quality.svg",
    "isolation": "kvloom isolation --model path/to/model --kv int8",
    "simulate": "kvloom simulate requests.jsonl --capacity 1024,4096 --policy lru,s3-fifo",
    "store ls": "kvloom store ls ./pages",
    "store show": "kvloom store show ./pages 3f2a",
    "store verify": "kvloom store verify ./pages",
    "store gc": "kvloom store gc ./pages --max-bytes 20GB --max-age 30",
    "store why": "kvloom store why ./pages notes.txt --model path/to/model --kv int8",
    "store convert": "kvloom store convert ./pages ./other notes.txt --model path/to/model --kv int8",
    "trace record": "kvloom trace record events.jsonl --prompt-file notes.txt",
    "trace replay": "kvloom trace replay events.jsonl --capacity 512",
    "view": "kvloom view events.jsonl --out pages.html",
    "info": "kvloom info --probe",
    "layouts": "kvloom layouts vllm flashinfer",
    "convert": "kvloom convert cache.safetensors other.safetensors --from vllm --to flashinfer",
    "carry": "kvloom carry cache.bin --from llama.cpp --to mlx --model path/to/model --out cache.safetensors",
    "conform list": "kvloom conform list",
    "conform describe": "kvloom conform describe pmx.key_value_cache",
    "conform mistakes": "kvloom conform mistakes",
    "conform vectors": "kvloom conform vectors ./vectors --dialect pmx.key_value_cache",
    "conform run": "kvloom conform run my_engine:key_value_cache --dialect pmx.key_value_cache",
    "completion": "kvloom completion bash >> ~/.bashrc",
}
"""One use of each command, which its help shows."""


_EXAMPLE: Final = "example: "


def complete(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add examples, defaults and groups to the help of a parser and of all its commands; returns it."""
    parser.formatter_class = _Help
    for name, command, sentence in commands_of(parser):
        command.formatter_class = _Help
        command.description = command.description or f"{sentence[:1].upper()}{sentence[1:]}."
        command.epilog = _EXAMPLE + EXAMPLES[name] if name in EXAMPLES else None
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Name, parser and sentence of each command that help lists, and of the commands of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                yield listed.dest, command, listed.help or ""
                for name, inner, sentence in commands_of(command):
                    yield f"{listed.dest} {name}", inner, sentence


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """A script that lets a shell complete the words of commands, and files where they are asked for.

    Args:
        parser: The parser of the whole command line.
        shell: ``"bash"``, ``"zsh"``, ``"fish"`` or ``"tcsh"``.
    """
    import shtab

    for action in parser._actions:  # commands without a sentence are not for use
        if isinstance(action, argparse._SubParsersAction):
            named = {listed.dest for listed in action._choices_actions}
            for name in {*action.choices} - named:
                del action.choices[name]
    for _, command, _ in commands_of(parser):
        for action in command._actions:
            if action.type is Path or action.metavar in _PATHS:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


_PATHS: Final = ("DIR", "F", "FILE", "PATH")


class _Help(argparse.HelpFormatter):
    """Help with defaults, an example on a line of its own, and commands by what they are for."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """The text of an option, and what holds without it unless the text says so."""
        text, value = action.help or "", action.default
        is_said = "default" in text or isinstance(value, bool) or value in (None, "", [], argparse.SUPPRESS)
        return text if is_said else f"{text} (default: {value})".strip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction) or "demo" not in action.choices:
            return super()._format_action(action)
        listed = {x.dest: x for x in action._choices_actions}
        width, lines = max(map(len, listed)), list[str]()
        for group, names in GROUPS.items():
            lines += [f"\n  {group}\n", *(f"    {x:{width}}  {listed[x].help}\n" for x in names)]
        return "".join(lines)
