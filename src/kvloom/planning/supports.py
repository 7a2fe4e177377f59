"""``kvloom supports``: what the layers of a model keep, and which uses it allows, without its weights."""

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvloom import terminal
from kvloom.errors import UnsupportedError

if TYPE_CHECKING:
    from kvloom.integrations.transformers.supports import Support

_WIDTH = 110


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvloom supports``."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="config.json or a GGUF file, or a folder with one",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def print_support(args: argparse.Namespace) -> None:
    """Print what the layers of a model keep, and which uses it allows."""
    with terminal.waiting("making the model without its weights"):
        from kvloom.planning.making import read_config

        found = support_of_config(read_config(args.model))
    sys.stdout.write(json.dumps(asdict(found)) if args.json else as_text(found))
    sys.stdout.write("\n")


def support_of_config(config: Any) -> "Support":
    """``support_of`` the model with a configuration, which is made without data.

    Raises:
        UnsupportedError: transformers makes no model that generates text of it.
    """
    import torch

    from kvloom.integrations.transformers import summary_of
    from kvloom.integrations.transformers.supports import support_of
    from kvloom.planning.making import model_of, without_logs

    try:
        with torch.device("meta"), without_logs():
            model = model_of(config)
    except Exception as error:  # transformers may raise anything for a configuration that it does not know
        raise UnsupportedError(
            f"model must be one of transformers that generates text, got {type(config).__name__}: "
            f"{summary_of(error)}"
        ) from error
    return support_of(model)


def as_text(found: "Support") -> str:
    """A few lines: layers by what they keep, and each use: ``yes``, or ``no`` or ``half`` and the reason."""
    lines = [f"{found.model}, {sum(found.layers.values())} layers"]
    lines += [f"  {count:4d} keep {keeps}" for keeps, count in found.layers.items()]
    width = max(map(len, found.why_not)) + 2
    for use, (answer, why) in found.answers().items():
        said = textwrap.wrap(f"{answer}: {why}" if why else answer, _WIDTH - width)
        lines.append(f"{use:{width}}{said[0]}")
        lines += [" " * width + line for line in said[1:]]
    return "\n".join(lines)
