"""``kvloom serve``: checks its options, loads the models and starts the server."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvloom.core.arguments import expect_within, read_text
from kvloom.core.spelling import PACKS, expect_kv
from kvloom.errors import ArgumentError
from kvloom.models import bundled_model_path, check_model_folder
from kvloom.serving import expect_installed
from kvloom.serving.options import LIMITS, LOOKUP
from kvloom.serving.settings import MOST, Settings, expect_writable, keys_from

if TYPE_CHECKING:
    from kvloom.serving.endpoints.models import Model

_LEAST_PAGE_SIZE: Final = 4
"""Least page size of transformers' sessions."""

_MOST_STEP: Final = 1 << 20
"""Largest number of tokens of a page or a step, whose tensors are allocated at the start."""

_MEMORY_SHARE: Final = 0.8
"""Largest share of the free memory for the pages of several models, divided equally."""


def serve(args: argparse.Namespace, load: Callable[[Path | None, str], tuple[Any, Any]]) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        args: The options.
        load: Function that loads the model and the tokenizer of a folder, or the bundled ones for ``None``,
            in a dtype or ``"auto"``.

    Returns:
        The exit status.
    """
    expect_installed()
    expect_kv("--kv", args.kv)
    if args.values is not None:
        expect_kv("--values", args.values)
    settings = Settings(
        host=args.host,
        port=args.port,
        api_keys=keys_from(args.api_key),
        allowed_origins=tuple(args.allow_origin),
        tls_certificate=args.tls_certificate,
        tls_key=args.tls_key,
        access_log=args.access_log,
        **{name: getattr(args, name) for name in LIMITS},
    )
    expect_within("--page-size", args.page_size, _LEAST_PAGE_SIZE, _MOST_STEP)
    if args.pages is not None:
        expect_within("--pages", args.pages, 1, MOST)
    expect_within("--picture-tokens", args.picture_tokens, args.page_size, MOST)
    if args.max_batch_tokens is not None:
        expect_within("--max-batch-tokens", args.max_batch_tokens, 1, _MOST_STEP)
    paths = _paths(args)
    template = None if args.chat_template is None else read_text("--chat-template", args.chat_template)
    if args.record_text and args.record is None:
        raise ArgumentError("--record-text must be given with --record, got it alone")
    if args.record is not None:
        expect_writable("--record", args.record)
    for path in paths.values():
        check_model_folder(path or bundled_model_path())  # before imports that take seconds
    _expect_drafts(args)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when it is imported
    from kvloom.serving import server

    models = [
        _model_of(name, path, len(paths), template, args, settings, load) for name, path in paths.items()
    ]
    if args.record is None:
        return server.serve_until_stopped(models, settings)
    session = models[0].session
    session.manager.record()
    status = server.serve_until_stopped(models, settings)
    session.manager.save_events(args.record, session.tokenizer.decode if args.record_text else None)
    return status


def _paths(args: argparse.Namespace) -> dict[str, Path | None]:
    """Folders of models by their names; ``None`` is the bundled model."""
    if not args.models:
        return {args.name or (args.model or bundled_model_path()).resolve().name: args.model}
    if args.model is not None or args.name is not None:
        raise ArgumentError("--model must be given without MODEL and --name, got both")
    found: dict[str, Path | None] = {}
    for text in args.models:
        name, _, path = text.partition("=")
        if not name or not path or name in found:
            raise ArgumentError(f"--model must be NAME=FOLDER, each with a name of its own, got {text!r}")
        found[name] = Path(path)
    if len(found) > 1 and (args.record is not None or args.chat_template is not None):
        raise ArgumentError("--record and --chat-template must be given with one model, got several")
    return found


def _expect_drafts(args: argparse.Namespace) -> None:
    """Check the folder of ``--drafts``, which may be meant as MODEL if there is none."""
    if args.drafts not in (None, LOOKUP):
        if args.model is None and not args.models:
            raise ArgumentError(
                f"--drafts must be given with MODEL if it has a folder, got {args.drafts} alone; for this "
                f"MODEL write {args.drafts} --drafts"
            )
        check_model_folder(Path(args.drafts))


def _drafts_of(
    args: argparse.Namespace, tokenizer: Any, load: Callable[[Path | None, str], tuple[Any, Any]]
) -> Any:
    """``drafts`` of the session: the assistant, which must have the tokenizer of the model."""
    if args.drafts in (None, LOOKUP):
        return args.drafts
    assistant, other = load(Path(args.drafts), args.dtype)
    own, theirs = tokenizer.get_vocab(), other.get_vocab()
    if own != theirs:
        differ = min(own.items() ^ theirs.items(), key=lambda x: (x[1], x[0]))
        raise ArgumentError(
            f"--drafts must be a model with the tokenizer of the other, got {args.drafts}, in which token "
            f"{differ[1]} differs"
        )
    return assistant


def _model_of(
    name: str,
    path: Path | None,
    num_models: int,
    template: str | None,
    args: argparse.Namespace,
    settings: Settings,
    load: Callable[[Path | None, str], tuple[Any, Any]],
) -> "Model":
    from transformers import ContinuousBatchingConfig

    from kvloom.serving.answering.session import ServingSession
    from kvloom.serving.answering.vision import processor_of
    from kvloom.serving.endpoints.models import Model

    model, tokenizer = load(path, args.dtype)
    processor = None if path is None else processor_of(model, path)
    usual = tokenizer.chat_template or getattr(processor, "chat_template", None)
    tokenizer.chat_template = template or usual
    config = ContinuousBatchingConfig(
        page_size=args.page_size, num_blocks=args.pages, max_batch_tokens=args.max_batch_tokens
    )
    if num_models > 1:
        config.max_memory_percent = _MEMORY_SHARE / num_models
    session = ServingSession(
        model,
        tokenizer,
        settings,
        config,
        kv=args.kv,
        values=args.values,
        policy=args.policy,
        batch_invariant=args.batch_invariant,
        pack=PACKS[args.pack],
        store=args.store,
        drafts=_drafts_of(args, tokenizer, load),
        processor=processor,
        picture_tokens=args.picture_tokens,
    )
    return Model((name, str(path or bundled_model_path())), session)
