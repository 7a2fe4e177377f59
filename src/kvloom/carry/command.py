"""``kvloom carry``: a cache that one engine saved, as a file for another. Imports no torch before it runs."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvloom import terminal
from kvloom.errors import ArgumentError

if TYPE_CHECKING:
    from kvloom.carry.carried import CarriedCache
    from kvloom.carry.geometry import CacheGeometry

_FORMATS = ("llama.cpp", "mlx", "safetensors")


class Models(NamedTuple):
    """How models are made for this command.

    Attributes:
        load: Function that loads model and tokenizer of a folder.
        sizes: Function that gives the ``CacheGeometry`` of a folder without loading weights.
    """

    load: Callable[[Path], tuple[Any, Any]]
    sizes: Callable[[Path], "CacheGeometry"]


def add_parser(commands: Any, models: Models) -> argparse.ArgumentParser:
    """Add ``carry`` to the commands, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "carry", help="a cache that one engine saved, as a file for another"
    )
    parser.add_argument("cache", type=Path, metavar="FILE", help="the cache")
    parser.add_argument("--describe", action="store_true", help="print what the file is, and write nothing")
    parser.add_argument("--from", dest="source", choices=_FORMATS, help="its format (default: what it is)")
    parser.add_argument("--to", dest="target", choices=_FORMATS, help="format to write")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("--model", type=Path, metavar="PATH", help="local Hugging Face folder of the model")
    parser.add_argument(
        "--prompt-file", type=Path, metavar="F", help="the text, with at least one token more than the cache"
    )
    parser.add_argument("--tokens", type=Path, metavar="F.json", help="the same as a list of ids")
    parser.add_argument(
        "--no-check", action="store_true", help="do not compare the first layer with the model"
    )
    parser.add_argument(
        "--kind", metavar="KIND", help="type to write: float32, float16, bfloat16, q8_0, q4_0"
    )
    parser.add_argument(
        "--bits", type=int, default=0, choices=(8, 4, 2), help="codes of mlx-lm to write (default: floats)"
    )
    parser.add_argument("--round", action="store_true", help="numbers may be rounded to --kind or --bits")
    parser.add_argument(
        "--form", default="sequence", choices=("sequence", "context", "state"), help="of llama.cpp"
    )
    parser.add_argument("--pairs", choices=("halves", "adjacent", "none"), help="of RoPE in llama.cpp's keys")
    for name, whose in (("--rotated", "FILE's codes"), ("--out-rotated", "the codes to write")):
        parser.add_argument(
            name,
            choices=("yes", "no"),
            help=f"whether llama.cpp rotates {whose}: yes, unless its process has LLAMA_ATTN_ROT_DISABLE=1",
        )
    parser.add_argument(
        "--no-flash-attention",
        action="store_true",
        help="llama.cpp's context has none: values are transposed",
    )
    parser.add_argument(
        "--llama-version",
        default="0.5.0",
        choices=("0.6.0", "0.5.0"),
        help="of llama.cpp, which reads its own",
    )
    parser.add_argument("--mlx-version", default="0.32.2", choices=("0.32.2", "0.28.4"), help="of mlx-lm")
    parser.set_defaults(models=models)
    return parser


def print_carry(args: argparse.Namespace) -> None:
    """Describe a file, or write another."""
    if args.describe:
        from kvloom.carry.describing import describe

        sys.stdout.write("\n".join(describe(args.cache)) + "\n")
        return
    for name, given in (("--to", args.target), ("--out", args.out), ("--model", args.model)):
        if given is None:
            raise ArgumentError(f"{name} must be given unless --describe is, got none")
    if args.tokens is not None and args.prompt_file is not None:
        raise ArgumentError("--tokens must not be given beside --prompt-file")
    from kvloom.carry.describing import format_of
    from kvloom.carry.files.beside import Beside, path_beside, read_beside, write_beside

    beside = read_beside(args.cache)
    source = args.source or format_of(args.cache)
    is_known = args.prompt_file is not None or args.tokens is not None or bool(beside and beside.tokens)
    geometry = args.models.sizes(args.model)
    with _named("rotated", "--rotated"):
        cache = _read(args, source, geometry)
    digest, report = "", ""
    if not args.no_check and (is_known or cache.tokens is not None):
        cache, digest, report = _checked(args, cache, beside)
    path_beside(args.out).unlink(missing_ok=True)  # of what was there before
    with _shown(cache) as shown, _named("rotated", "--out-rotated"):
        _write(args, shown, geometry, digest)
    if digest and args.target != "mlx":
        write_beside(args.out, Beside(digest, cache.tokens))
    kinds = ", ".join(cache.kinds)
    checked = report or "first layer not compared with the model"
    sys.stdout.write(
        f"{cache.num_tokens:,} tokens of {len(cache.layers)} layers ({kinds}): "
        f"{args.out.stat().st_size:,} bytes in {args.out}; {checked}\n"
    )


def _read(args: argparse.Namespace, source: str, geometry: "CacheGeometry") -> "CarriedCache":
    from kvloom.carry import read_llama, read_mlx
    from kvloom.carry.array_file import read_array_file

    if source == "llama.cpp":
        return read_llama(args.cache, geometry, pairs=args.pairs, rotated=_yes(args.rotated))
    if source == "mlx":
        return read_mlx(args.cache, geometry, pairs=_pairs_of_mlx(args.model))
    return read_array_file(args.cache, geometry)


def _checked(args: argparse.Namespace, cache: "CarriedCache", beside: Any) -> tuple["CarriedCache", str, str]:
    """The cache with its tokens, the model's digest, and what the check of the first layer found."""
    from dataclasses import replace

    from kvloom.carry.files.beside import DIGEST, expect_digest
    from kvloom.carry.first_layer import expect_first_layer
    from kvloom.integrations.transformers.pool.identity import model_digest

    model, tokenizer = args.models.load(args.model)
    given = _tokens(args, tokenizer)
    count = cache.num_tokens
    if given is not None:
        name = "--tokens" if args.tokens is not None else "--prompt-file"
        if len(given) <= count:
            raise ArgumentError(
                f"{name} must have a token more than the {count:,} of the cache, which the target computes, "
                f"got {len(given):,}"
            )
        if cache.tokens is not None and cache.tokens != tuple(given[:count]):
            raise ArgumentError(f"{name} must begin with the tokens of the cache, got others")
    found = given[:count] if given is not None else cache.tokens or beside.tokens
    cache = replace(cache, tokens=tuple(found))
    digest = model_digest(model)
    for said in (dict(cache.said).get(DIGEST), beside and beside.digest):
        if said:
            expect_digest(said, digest)
    report = expect_first_layer(cache, model)
    return cache, digest, f"first layer off by {max(report.worst_key, report.worst_value):.1e}"


def _tokens(args: argparse.Namespace, tokenizer: Any) -> list[int] | None:
    if args.tokens is not None:
        try:
            found = json.loads(args.tokens.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"--tokens must be a list of ids in JSON: {error}") from error
        if not isinstance(found, list) or not all(type(x) is int for x in found):
            raise ArgumentError("--tokens must be a list of ids in JSON")
        return found
    if args.prompt_file is None:
        return None
    from kvloom.core.arguments import read_text

    ids: list[int] = tokenizer(read_text("--prompt-file", args.prompt_file)).input_ids
    return ids


def _write(args: argparse.Namespace, cache: "CarriedCache", geometry: "CacheGeometry", digest: str) -> None:
    from kvloom.carry import write_llama, write_mlx
    from kvloom.carry.array_file import write_array_file
    from kvloom.carry.files.beside import DIGEST

    if args.target == "llama.cpp":
        write_llama(
            cache,
            args.out,
            geometry,
            form=args.form,
            kind=args.kind,
            pairs=args.pairs,
            rotated=_yes(args.out_rotated),
            flash_attention=not args.no_flash_attention,
            rounding=args.round,
            version=args.llama_version,
        )
    elif args.target == "mlx":
        write_mlx(
            cache,
            args.out,
            kind=args.kind,
            bits=args.bits,
            pairs=_pairs_of_mlx(args.model),
            rotary=geometry.layers[0].rotary,
            version=args.mlx_version,
            metadata={DIGEST: digest} if digest else None,
            rounding=args.round,
        )
    else:
        write_array_file(cache, args.out, geometry, kind=args.kind, rounding=args.round)


def _yes(text: str | None) -> bool | None:
    return None if text is None else text == "yes"


def _pairs_of_mlx(folder: Path) -> str:
    """Order of pairs of mlx-lm's model, by the configuration of a folder."""
    path = folder if folder.is_file() else folder / "config.json"
    return "adjacent" if json.loads(path.read_bytes()).get("rope_traditional") else "halves"


@contextmanager
def _named(argument: str, option: str) -> Iterator[None]:
    """Context whose errors name an option instead of the argument that they begin with."""
    try:
        yield
    except ArgumentError as error:
        if not str(error).startswith(f"{argument} "):
            raise
        raise ArgumentError(f"{option}{str(error).removeprefix(argument)}") from error


@contextmanager
def _shown(cache: "CarriedCache") -> Iterator["CarriedCache"]:
    """The cache, with a bar on a terminal that moves as its sides are read."""
    from dataclasses import replace

    from kvloom.carry.carried import ALL

    with terminal.bar() as bar:
        total = sum(side.num_tokens for layer in cache.layers for _, side in layer.sides)
        task = bar.add_task("carry", total=total)

        def counted(side: Any) -> Any:
            def counting(load: Any) -> Any:
                def counted_load(tokens: slice = ALL) -> Any:
                    bar.advance(task, len(range(side.num_tokens)[tokens]))
                    return load(tokens)

                return counted_load

            adjacent = None if side.adjacent is None else counting(side.adjacent)
            return replace(side, load=counting(side.load), adjacent=adjacent)

        layers = tuple(replace(x, keys=counted(x.keys), values=counted(x.values)) for x in cache.layers)
        yield replace(cache, layers=layers)
