"""What encoders read, by the names of a model's arguments, and digests by which it is known again."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENTS, OF_ENCODER
from kvloom.integrations.transformers.models.content import (
    bytes_of,
    digest_of,
    expect_inputs,
    has_no_effect,
    is_no_input,
)
from kvloom.integrations.transformers.models.text_config import text_config_of

INPUTS: Final = (
    OF_ENCODER, "encoder_outputs", "input_ids", "input_features", "input_values", "pixel_values",
    "flattened_patches", "inputs_embeds",
)  # fmt: skip
"""Arguments of a forward that say what the encoder reads; the first that is given counts."""
PREFIX: Final = "decoder_"
"""What names of a decoder's arguments begin with in its model's forward."""
_OF_BOTH: Final = frozenset({"cache_position", "use_cache", *CACHE_ARGUMENTS})
MASK: Final = "attention_mask"
"""The mask of what an encoder reads."""
_CONTENT: Final = re.compile(r"[\w,]+ [0-9a-f]{64}( [0-9a-f]{64})?")
"""Names, a digest of their values without the mask, and one of the mask if it is among them."""


def content_of_rows(inputs: Mapping[str, Any], placeholders: Mapping[int, str]) -> list[str]:
    """The names of what an encoder reads, with a digest, for each row.

    Args:
        inputs: Arguments of the model's ``forward`` by their names, such as a processor's outputs. Those of
            the decoder, and a row's ``attention_mask`` that hides nothing, are ignored.
        placeholders: Tokens that stand for pictures and the like, with their names.

    Raises:
        ArgumentError: none of the inputs is one that an encoder reads, there are only placeholders of what it
            reads, or as ``content_of``.
    """
    expect_inputs(inputs)
    read = {name: x for name, x in inputs.items() if not _is_of_decoder(name) and not is_no_input(x)}
    read = {name: x for name, x in read.items() if not has_no_effect(name)}
    main = read.get(main_input(read))
    if main is None:
        raise ArgumentError(f"inputs must have one of {', '.join(INPUTS)}, got {', '.join(inputs) or 'none'}")
    if {*read} <= {"input_ids", MASK}:
        for token in placeholders.keys() & {*torch.as_tensor(main).flatten().tolist()}:
            raise ArgumentError(
                f"inputs must have what token {token}, the {placeholders[token]}, stands for, got none"
            )
    rows = torch.as_tensor(main[0] if isinstance(main, (Mapping, tuple)) else main).shape[0]
    return [_content_of({name: _row_of(x, row, rows) for name, x in read.items()}) for row in range(rows)]


def _content_of(row: Mapping[str, Any]) -> str:
    named = {name: x for name, x in row.items() if not (name == MASK and _hides_nothing(x))}
    digest = digest_of(b"kvloom encoder", {name: x for name, x in named.items() if name != MASK})
    mask = f" {_digest_of_mask(named[MASK])}" if MASK in named else ""
    return f"{','.join(sorted(named))} {digest}{mask}"


def _digest_of_mask(mask: Any) -> str:
    """Digest of a row's mask, whatever the dtype of its zeros and ones is."""
    is_plain = isinstance(mask, Tensor) and mask.ndim == 2
    return hashlib.sha256(b"".join(bytes_of(MASK, mask.bool() if is_plain else mask))).hexdigest()


def _row_of(x: Any, row: int, rows: int) -> Any:
    """One row of what is given for all."""
    if hasattr(x, "__array__"):
        x = torch.as_tensor(x)
        x = x if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool else x.long()
        return x[row : row + 1] if x.ndim and len(x) == rows else x
    if isinstance(x, Mapping):
        return {name: _row_of(own, row, rows) for name, own in x.items() if not is_no_input(own)}
    if isinstance(x, (list, tuple)):
        return [_row_of(own, row, rows) for own in x]
    return x


def expect_contents(content: object, rows: int) -> list[str]:
    """The content of each row; one of a single row is that of all.

    Raises:
        ArgumentError: ``content`` is no result of ``content_of_rows``.
    """
    contents = [content] if isinstance(content, str) else content
    is_known = isinstance(contents, Sequence) and all(
        isinstance(x, str) and _CONTENT.fullmatch(x) for x in contents
    )
    if not is_known or not isinstance(contents, Sequence) or len(contents) not in (1, rows):
        raise ArgumentError(
            f"content must be pool.content_of(inputs), of what the encoder reads, in one row or {rows} as "
            f"input_ids has, got {content!r}"
        )
    return [*contents] * (rows if len(contents) == 1 else 1)


def contents_of_given(inputs: Mapping[str, Any], rows: int) -> list[str]:
    """What an encoder reads in each row of a forward; empty where that is not known."""
    try:
        contents = content_of_rows(inputs, {})
    except ArgumentError:
        return [""] * rows
    return contents if len(contents) == rows else [""] * rows


def are_others(given: Sequence[str], contents: Sequence[str]) -> bool:
    """Whether what an encoder reads in a row is known, of the same names as contents say, and other values.

    Audio may come without its mask, which some encoders do not read; tokens may not.
    """
    for one, said in zip(given, contents, strict=False):  # none are given where they are not known
        names, own = ({*x.partition(" ")[0].split(",")} for x in (one, said))
        if one != said and (names == own or ("input_ids" in names and names ^ own == {MASK})):
            return True
    return False


def main_input(inputs: Mapping[str, Any]) -> str:
    """Name of the first of ``INPUTS`` that a forward is given; empty without any."""
    return next((name for name in INPUTS if inputs.get(name) is not None), "")


def undeclared(inputs: Mapping[str, Any], contents: Sequence[str]) -> Iterator[str]:
    """Names of inputs of a forward that an encoder reads, and of which contents of rows do not say so."""
    rows = [content.partition(" ")[0].split(",") for content in contents]
    for name, x in inputs.items():
        if _is_of_decoder(name) or has_no_effect(name) or is_no_input(x) or name == "encoder_outputs":
            continue
        is_mask = name == MASK and isinstance(x, Tensor) and len(x) == len(rows)  # see has_other_mask
        if not is_mask and not all(name in names for names in rows):
            yield name


def has_other_mask(mask: Any, contents: Sequence[str]) -> bool:
    """Whether the mask of a forward, which a decoder reads too, is another than contents of rows say.

    A decoder that needs the mask of features may be told by its encoder, and be given none.
    """
    rows = [content.split(" ") for content in contents]
    if not isinstance(mask, Tensor) or len(mask) != len(rows):
        return mask is None and any({MASK, "input_ids"} <= {*names.split(",")} for names, *_ in rows)
    own = [mask[row : row + 1] for row in range(len(rows))]
    found = [[] if _hides_nothing(x) else [_digest_of_mask(x)] for x in own]
    return found != [digests for _, _, *digests in rows]


def of_decoder(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a decoder among those of its model's forward, by their names without ``PREFIX``."""
    kept = {name: x for name, x in inputs.items() if _is_of_decoder(name)}
    return {name.removeprefix(PREFIX): x for name, x in kept.items()}


def _is_of_decoder(name: str) -> bool:
    return name.startswith(PREFIX) or name in _OF_BOTH


def _hides_nothing(mask: Any) -> bool:
    return isinstance(mask, Tensor) and bool(mask.all())


class _Outputs(BaseModelOutput):  # type: ignore[misc]
    """Outputs of an encoder; what some families read beside hidden states is ``None``."""

    attention_mask = router_logits = None


def encoder_width(model: Any) -> int:
    """Elements of a hidden state that the encoder of a model returns."""
    own = getattr(model.get_encoder(), "config", model.config)
    configs = (own, own.get_text_config(), model.config, text_config_of(model))
    return next(int(x) for x in (getattr(config, "hidden_size", None) for config in configs) if x)


def random_outputs(model: Any, num_tokens: int) -> dict[str, Any]:
    """Argument ``encoder_outputs`` of ``num_tokens`` random states, for a trial of the decoder."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, num_tokens, encoder_width(model), generator=generator)
    states = states.to(model.device, model.dtype)
    return {"encoder_outputs": _Outputs(last_hidden_state=states)}
