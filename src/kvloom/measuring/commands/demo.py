"""``kvloom demo``: the bundled model on held-out text, and a table of kinds of caches."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvloom import terminal
from kvloom.core.arguments import expect_options
from kvloom.measuring import continuation

_KINDS: Final = ["float32", "int8", "int4"]
_PROMPT_CHARACTERS: Final = 2200


def print_demo(args: argparse.Namespace, load: Callable[[None], tuple[Any, Any]]) -> None:
    """Continue a text, and compare kinds of caches on it.

    Args:
        args: Options of the command.
        load: Loads the bundled model and its tokenizer.
    """
    expect_options(args, 1, "max_new_tokens", "runs")
    from kvloom.integrations.transformers.models.positions import room_behind
    from kvloom.measuring.compare import attention_for, compare
    from kvloom.models import corpus_files

    source = next(file for file in corpus_files("heldout") if len(file.read()) > 4 * _PROMPT_CHARACTERS)
    # It ends with the name of a function, so that the model continues with a body.
    prompt = re.findall(r"(?s).*\n *(?:async )?def \w+", source.read()[:_PROMPT_CHARACTERS])[0]
    model, tokenizer = load(None)
    console = terminal.console()
    console.print(f"{source.name} (held out), continued from int8 pages read in place:\n")
    with attention_for(model, "int8", in_place=True):
        folder = str(_folder())
        continuation.write(model, tokenizer, prompt, "int8", args.max_new_tokens, 12, folder, args.view)
    inputs = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    count = room_behind("prompt", model, inputs.shape[1], args.max_new_tokens)
    with terminal.waiting("comparing kinds of caches"):
        rows = compare(model, inputs, _KINDS, max_new_tokens=count, num_runs=args.runs, in_place=True)
    headings = "cache", "bytes/token", "tokens/s", "same tokens", "agree", "KL"
    title = f"{inputs.shape[1]} prompt tokens, {rows[0].num_tokens} new ones, greedy"
    table = terminal.table(*headings, title=title)
    for row in rows:
        ratio = rows[0].nbytes_per_token / row.nbytes_per_token
        table.add_row(
            row.kind if row is rows[0] else f"kvloom {row.kind}",
            f"{row.nbytes_per_token:,.0f} (1/{ratio:.1f})" if ratio > 1 else f"{row.nbytes_per_token:,.0f}",
            f"{row.tokens_per_s:.1f}",
            f"{row.num_same} of {row.num_tokens}",
            f"{row.num_agreed / row.num_tokens:.0%}",
            f"{row.mean_kl:.5f}",
        )
    console.print(table)
    console.print("same tokens: before the first that differs from DynamicCache's")
    console.print("agree, KL (nats): next tokens where both are fed DynamicCache's")


def _folder() -> Path:
    """Folder of the demos' store, a few hundred kilobytes; the next demo reads its prompt from it."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "kvloom" / "demo"
