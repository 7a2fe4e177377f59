"""Command line ``kvloom``. The only module that combines models, integrations and output."""

import argparse
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from kvloom import __version__, terminal
from kvloom.carry import command as carrying
from kvloom.command_help import complete, completion
from kvloom.conform.command import add_conform
from kvloom.core.arguments import expect_options
from kvloom.core.spelling import STORAGE, expect_kv
from kvloom.errors import ArgumentError, KVError
from kvloom.layouts.command import add_layouts
from kvloom.measuring import continuation
from kvloom.measuring.commands import demo as demo_command
from kvloom.measuring.commands import isolation as isolation_command
from kvloom.measuring.commands import quality as quality_command
from kvloom.measuring.commands import record as record_command
from kvloom.models import bundled_model_path, check_model_folder
from kvloom.planning import command as planning
from kvloom.planning import supports
from kvloom.serving import check_command, command, options
from kvloom.simulation import command as simulation
from kvloom.store.command import add_parser as add_store_parser
from kvloom.tracing.command import add_parsers as add_tracing

_OPTIONS = {
    "api_keys": "--api-key",
    "allowed_origins": "--allow-origin",
    "config": "--model",
    "max_states": "--states",
}
_CLOSED_PIPE = 141  # as the shell says of a process that SIGPIPE ends

_INSTALLED = {
    "transformers": "transformers rich",
    "safetensors": "transformers rich",
    "rich": "transformers rich",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "kvloom_conform": "kvloom-conform",
    "kvloom_model": "kvloom-model",
    "xxhash": "xxhash",
    "obstore": "obstore",
    "redis": "redis",
    "shtab": "shtab",
    "gguf": "gguf",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if sys.stdout is None:
            raise ArgumentError("standard output must be open, got a closed one")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for characters that it cannot encode
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has read enough
        _give_up_output()
        return _CLOSED_PIPE
    except (KVError, OSError) as error:
        _give_up_output()
        return _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name not in _INSTALLED:
            raise
        return _fail(f"this needs {error.name}: pip install {_INSTALLED[error.name]}")
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return status or 0


def _fail(message: str, status: int = 2) -> int:
    sys.stderr.write(f"kvloom: {' '.join(message.split())}\n")
    return status


def _give_up_output() -> None:
    """Discard output that could not be written, so that Python does not try again when it exits."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvloom", description="A KV cache for transformer inference.")
    parser.add_argument("--version", action="version", version=f"kvloom {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", title="commands")

    generate = commands.add_parser("generate", help="continue a prompt, keys and values in a kvloom cache")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="F", help="file with the text to continue")
    generate.add_argument(
        "--kv",
        default="auto",
        metavar="KIND[:gGROUP]",
        help=f"how the cache is kept: {', '.join(STORAGE)} (auto: model's dtype; int8:g32: 32 elements "
        "share a scale, int8 alone 64; default: auto)",
    )
    generate.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens to write, at most"
    )
    generate.add_argument("--model", type=Path, metavar="PATH", help="local Hugging Face causal model folder")
    generate.add_argument(
        "--store",
        metavar="DIR",
        help="folder, or URL such as s3://bucket/folder, that keeps what was computed for the next run",
    )
    generate.set_defaults(run=_generate)

    demo = commands.add_parser("demo", help="the bundled model on held-out text, and a table of cache kinds")
    demo.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="tokens to write with each cache kind"
    )
    demo.add_argument("--runs", type=int, default=3, metavar="N", help="timed runs of each cache kind")
    demo.add_argument("--view", type=Path, metavar="FILE", help="write a page of HTML that shows the pages")
    demo.set_defaults(run=partial(demo_command.print_demo, load=_load))

    quality = quality_command.add_parser(commands, partial(_load_folder, with_encoder=True))
    quality.set_defaults(run=_options_named("kv|model|bits|budget")(quality_command.print_quality))

    isolation = isolation_command.add_parser(commands, _load_folder)
    isolation.set_defaults(run=_options_named("kv|model")(isolation_command.print_isolation))

    serve = commands.add_parser("serve", help="a server for OpenAI's clients, many requests at once")
    options.add_options(serve)
    serve.set_defaults(run=_serve)

    checked = commands.add_parser("check-answers", help="whether a server answers among others as alone")
    check_command.add_options(checked)
    checked.set_defaults(
        run=_options_named("requests|clients|system|words|new_tokens|url")(check_command.print_check)
    )

    gone = commands.add_parser("bench")  # without help, which would list it
    gone.add_argument("words", nargs=argparse.REMAINDER)
    gone.set_defaults(run=_bench)

    add_store_parser(commands, _question, _exchange)

    plan = commands.add_parser("plan", help="whether a model and its cache will fit, to the byte")
    planning.add_options(plan)
    plan.set_defaults(
        run=_options_named("kv|model|config|context|batch|page_size|encoder_tokens|beams")(
            planning.print_plans
        )
    )
    uses = commands.add_parser("supports", help="what the layers of a model keep, and which uses it allows")
    supports.add_options(uses)
    uses.set_defaults(run=_options_named("model")(supports.print_support))

    simulate = commands.add_parser("simulate", help="hit rates of a trace with other capacities and policies")
    simulation.add_options(simulate)
    simulate.set_defaults(
        run=_options_named("capacity|policy|page_size|below|states|max_states|state_interval|state_tokens")(
            simulation.print_hits
        )
    )

    record = _options_named("kv|model")(record_command.record_events)
    add_tracing(commands, lambda args: record(args, _load_folder))

    add_layouts(commands, _options_named("page_size|shards|heads"))

    carry = carrying.add_parser(commands, carrying.Models(_load_folder, _sizes))
    carry.set_defaults(run=_options_named("model|kind|bits|pairs|form|tokens")(carrying.print_carry))

    add_conform(commands.add_parser("conform", help="judge an implementation of an operator by its vectors"))

    info = commands.add_parser("info", help="version, backends, CPU capability, devices")
    info.add_argument("--probe", action="store_true", help="time attention with each instruction set")
    info.set_defaults(run=_info)

    completed = commands.add_parser("completion", help="a script with which a shell completes this command")
    completed.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"), help="the shell that reads it")
    completed.set_defaults(run=lambda args: _complete(parser, args.shell))
    return complete(parser)


def _complete(parser: argparse.ArgumentParser, shell: str) -> None:
    sys.stdout.write(completion(parser, shell))


def _generate(args: argparse.Namespace) -> None:
    expect_options(args, 1, "max_new_tokens")
    expect_kv("--kv", args.kv)
    prompt = _read_prompt(args)
    with _options_named(), ExitStack() as stack:
        if args.model is not None:
            check_model_folder(args.model)  # before imports that take seconds
            stack.enter_context(_somebodys_folder(args.model))
        model, tokenizer = _load(args.model)
        continuation.write(model, tokenizer, prompt, args.kv, args.max_new_tokens, store=args.store)


def _model_and_text(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """Model of ``kvloom store why`` and ``convert``, and the tokens of their text."""
    args.prompt, args.prompt_file = None, Path(args.prompt_file)
    expect_kv("--kv", args.kv)
    prompt = _read_prompt(args)
    with _options_named(), ExitStack() as stack:
        path = None if args.model is None else Path(args.model)
        if path is not None:
            check_model_folder(path)
            stack.enter_context(_somebodys_folder(path))
        model, tokenizer = _load(path)
        return model, tokenizer(prompt).input_ids


def _question(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """Fingerprint of a model, and the tokens of the text of ``kvloom store why``."""
    model, tokens = _model_and_text(args)
    from kvloom.integrations.transformers.pool.identity import fingerprint_of

    with _options_named():
        return fingerprint_of(model, args.kv), tokens


def _exchange(args: argparse.Namespace) -> None:
    expect_options(args, 1, "page_size")
    model, tokens = _model_and_text(args)
    from kvloom.integrations.transformers.exchange import exchange
    from kvloom.store.sums import read_sums

    with _options_named():
        key = read_sums(args.key_file).key
        with terminal.waiting("copying keys and values"):
            count = exchange(args.source, args.target, model, tokens, args.kv, args.page_size, args.salt, key)
    said = f"{count} of {len(tokens)} tokens are in {args.target}"
    sys.stdout.write(f"{json.dumps({'stored': count, 'tokens': len(tokens)}) if args.json else said}\n")


def _read_prompt(args: argparse.Namespace) -> str:
    try:
        if args.prompt is None:
            return str(args.prompt_file.read_text(encoding="utf-8"))
        args.prompt.encode("utf-8")  # invalid bytes of the command line arrive as surrogates
        return str(args.prompt)
    except (OSError, ValueError) as error:
        name = "--prompt-file" if args.prompt is None else "--prompt"
        raise ArgumentError(f"{name} must be text in UTF-8: {error}") from error


@contextmanager
def _options_named(names: str = "kv|model|store") -> Iterator[None]:
    """Context whose errors name an option instead of the library's argument."""
    try:
        yield
    except KVError as error:
        text = re.sub(
            rf"^({names})\b", lambda x: _OPTIONS.get(x[1]) or f"--{x[1].replace('_', '-')}", str(error)
        )
        raise type(error)(text) from error


@contextmanager
def _somebodys_folder(path: Path) -> Iterator[None]:
    """Context without warnings of transformers about a folder, and with its errors as one sentence."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read once, at import
    with terminal.waiting("importing torch and transformers"):
        from kvloom.integrations.transformers import summary_of

    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (KVError, OSError):
        raise
    except Exception as error:
        raise ArgumentError(
            f"model must be one that can generate, got {str(path)!r}: {summary_of(error)}"
        ) from error
    finally:
        logger.setLevel(level)


def _serve(args: argparse.Namespace) -> int:
    with _options_named(
        "kv|values|pack|batch_invariant|store|host|port|page_size|max_\\w+|(?:body|header|drain)_seconds|"
        "session_\\w+|api_keys|allowed_origins|tls_certificate"
    ):
        return command.serve(args, _load_folder)


def _bench(args: argparse.Namespace) -> None:
    raise ArgumentError(
        "kvloom bench is gone: `guidellm run` measures a server, see docs/serving.md, and "
        "`kvloom check-answers` compares its answers with those of each request alone"
    )


def _load_folder(path: Path | None, dtype: str = "auto", *, with_encoder: bool = False) -> tuple[Any, Any]:
    with _somebodys_folder(path) if path is not None else nullcontext():
        return _load(path, dtype, with_encoder=with_encoder)


def _sizes(path: Path) -> Any:
    """Sizes of the layers of a folder's model, made without weights."""
    with _somebodys_folder(path), terminal.waiting("making the model without its weights"):
        from kvloom.carry.own.model_geometry import geometry_of
        from kvloom.planning.making import model_of, read_config, without_data

        with without_data():
            return geometry_of(model_of(read_config(path)))


def _info(args: argparse.Namespace) -> None:
    from kvloom.info import print_info

    print_info(args.probe)


def _load(path: Path | None, dtype: str = "auto", *, with_encoder: bool = False) -> tuple[Any, Any]:
    """Load model and tokenizer on the best device; the bundled ones by default."""
    with terminal.waiting("importing torch and transformers"):
        import torch

        from kvloom.integrations.transformers import load_model

    # No progress bar for a file of a few megabytes, nor without a terminal.
    model, tokenizer = load_model(
        path or bundled_model_path(),
        None if dtype == "auto" else getattr(torch, dtype),
        progress=path is not None and sys.stderr.isatty(),
        with_encoder=with_encoder,
    )
    if torch.cuda.is_available():
        return model.to("cuda"), tokenizer
    # CPUs multiply float16 slowly, and round each step.
    return (model.float() if (dtype, model.dtype) == ("auto", torch.float16) else model), tokenizer
