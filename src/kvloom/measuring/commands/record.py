"""``kvloom trace record``: continue texts one after the other in one pool, and write its events."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvloom import terminal
from kvloom.core.arguments import expect_options, read_text
from kvloom.core.spelling import parse_kind
from kvloom.errors import ArgumentError


def record_events(args: argparse.Namespace, load: Callable[[Path | None], tuple[Any, Any]]) -> None:
    """Record, and write the file.

    Args:
        args: The options.
        load: Function that loads model and tokenizer of a folder, or the bundled ones.
    """
    parse_kind("--kv", args.kv)
    expect_options(args, 1, "pages", "page_size", "max_new_tokens")
    prompts = [_read(path) for path in args.prompt_file]
    model, tokenizer = load(args.model)
    from kvloom.integrations.transformers import KVPool
    from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
    from kvloom.integrations.transformers.models.positions import room_behind

    model.generation_config.cache_implementation = None  # kvloom's cache is used
    size = args.page_size
    pool = KVPool.for_model(model, kv=args.kv, page_size=size, max_tokens=args.pages * size)
    events = pool.record()
    for path, prompt in terminal.tracked([*zip(args.prompt_file, prompts, strict=True)], "texts continued"):
        tokens = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
        count = room_behind("--prompt-file", model, tokens.shape[1], args.max_new_tokens)
        cache = pool.begin(tokens)
        events.name(path.name)
        out = model.generate(
            tokens,
            attention_mask=tokens.new_ones(tokens.shape),
            **{CACHE_ARGUMENT: cache},
            max_new_tokens=count,
            do_sample=False,
        )
        pool.commit(cache, out)
        del cache
    pool.save_events(args.events, None if args.no_text else tokenizer.decode)


def _read(path: Path) -> str:
    text = read_text("--prompt-file", path)
    if not text:
        raise ArgumentError(f"--prompt-file must have at least one token, got an empty text in {str(path)!r}")
    return text
