"""Inputs beside tokens that decide keys and values: pictures, audio, embeddings, positions, masks."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENTS

_PLACEHOLDER: Final = re.compile(
    r"(image|video|audio|speech|vision|visual|media|sound|patch|pixel|frame)\w*_token_(id|index)"
)
_OF_TOKENS: Final = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache_position", *CACHE_ARGUMENTS}
)
_WITHOUT_EFFECT: Final = frozenset(
    {"labels", "logits_to_keep", "num_items_in_batch", "num_logits_to_keep", "shift_labels", "use_cache"}
)
_OUTPUTS: Final = ("output_", "return_")
"""What names of arguments begin with that choose what a forward returns."""
_TYPES: Final = ("token_type_ids", "mm_token_type_ids")


def expect_inputs(inputs: object) -> None:
    """Raise ArgumentError unless ``inputs`` is a mapping."""
    if not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs must be a mapping of names to values, got {type(inputs).__name__}")


def content_of(inputs: Mapping[str, Any]) -> str:
    """A digest of a processor's outputs except tokens: the ``content`` argument of ``KVPool.begin``.

    The same pictures, sounds or embeddings have the same digest in every process::

        inputs = processor(images=picture, text=prompt, return_tensors="pt")
        content = content_of(inputs)
        cache = pool.begin(inputs["input_ids"], content=content)

    Args:
        inputs: Arguments of the model's ``forward`` by their names. ``input_ids``, an ``attention_mask`` that
            hides nothing, and what is ``None`` or empty are ignored.

    Returns:
        64 hexadecimal digits; empty if there are only tokens.

    Raises:
        ArgumentError: ``inputs`` is no mapping, or a value is no tensor, number, text or sequence of them.
    """
    expect_inputs(inputs)
    named = dict[str, Any]()
    for name, value in inputs.items():
        if name in ("input_ids", "cache_position") or name in CACHE_ARGUMENTS or is_no_input(value):
            continue
        is_mask = name == "attention_mask" and isinstance(value, Tensor)
        if name in _WITHOUT_EFFECT or (is_mask and bool(value.all())):
            continue
        if name in _TYPES and isinstance(value, Tensor) and not bool(value.any()):
            continue
        named[name] = value
    return digest_of(b"kvloom content", named) if named else ""


def digest_of(purpose: bytes, named: Mapping[str, Any]) -> str:
    """64 hexadecimal digits for values by their names, in any order.

    Raises:
        ArgumentError: as ``content_of``.
    """
    digest = hashlib.sha256(purpose + b"\0")
    for name in sorted(named):
        digest.update(f"{len(name)} {name} ".encode())
        for part in bytes_of(name, named[name]):
            digest.update(part)
    return digest.hexdigest()


def bytes_of(name: str, value: Any) -> Iterator[bytes]:
    """An injective encoding of a value."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {list(value.shape)} ".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "__array__"):
        yield from bytes_of(name, torch.as_tensor(value))
    elif isinstance(value, (str, int, float, bool)):
        text = repr(value).encode()
        yield b"%d %b " % (len(text), text)
    elif isinstance(value, (list, tuple)):
        yield b"[%d " % len(value)
        for item in value:
            yield from bytes_of(name, item)
    elif isinstance(value, Mapping):
        yield b"{%d " % len(value)
        for key in sorted(value, key=str):
            yield from bytes_of(name, str(key))
            yield from bytes_of(name, value[key])
    else:
        raise ArgumentError(
            f"inputs[{name!r}] must be a tensor, number, text or sequence of them, got {type(value).__name__}"
        )


def has_no_effect(name: str) -> bool:
    """Whether an argument of this name changes no keys and values, but at most what a forward returns."""
    return name in _WITHOUT_EFFECT or name.startswith(_OUTPUTS)


def is_no_input(value: Any) -> bool:
    """Whether the value of an argument is ``None``, or holds nothing else, such as ``{"image": None}``."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return 0 in getattr(value, "shape", ())
    if isinstance(value, Mapping):
        return all(map(is_no_input, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_no_input, value))
    return value is None


def placeholders_of(config: Any) -> dict[int, str]:
    """Ids of placeholder tokens for pictures, audio and the like, with their names in a configuration."""
    found: dict[int, str] = {}
    for name, value in vars(config).items():
        if (
            _PLACEHOLDER.search(name)
            and isinstance(value, int)
            and not isinstance(value, bool)
            and value >= 0
        ):
            found[value] = name
    return found


def expect_content(
    placeholders: Mapping[int, str], rows: Sequence[Sequence[int]], content: object
) -> list[str]:
    """The content of each row of a batch.

    Args:
        placeholders: Result of ``placeholders_of``.
        rows: Tokens of each row.
        content: ``None``, one string for all rows, or one for each.

    Raises:
        ArgumentError: a row has a placeholder and no content, or ``content`` is none of these.
    """
    if content is None or isinstance(content, str):
        contents = [content or ""] * len(rows)
    elif isinstance(content, Sequence) and all(isinstance(x, str) for x in content):
        contents = list(content)
    else:
        raise ArgumentError(f"content must be a string or one for each row, got {content!r}")
    if len(contents) != len(rows):
        raise ArgumentError(f"content must be one string for each of {len(rows)} rows, got {len(contents)}")
    for tokens, said in zip(rows, contents, strict=True):
        if said or not placeholders:
            continue
        for token in placeholders.keys() & set(tokens):
            raise ArgumentError(
                f"content must be given for input_ids with token {token}, the {placeholders[token]}: a "
                f"digest of its content, as content_of(inputs) makes it, got none"
            )
    return contents


def is_within(placeholders: Mapping[int, str], tokens: Sequence[int], end: int) -> bool:
    """Whether a prefix ends within the placeholders of a picture, which a forward needs as a whole."""
    return 0 < end < len(tokens) and tokens[end - 1] in placeholders and tokens[end] in placeholders


def input_beside_tokens(
    inputs: Mapping[str, Any],
    past: int,
    begins: Sequence[int],
    has_placeholders: bool,
    defaults: Mapping[str, Any],
) -> str | None:
    """Name of an input of a forward, beside its tokens, that may change keys and values; ``None`` if none.

    It need not be a tensor: with ``is_causal=False`` tokens see later ones, ``adapter_names`` choose weights.

    Args:
        inputs: Arguments of ``forward`` by their names.
        past: Columns in the cache.
        begins: Column of the first token of each row; the padding mask was checked before.
        has_placeholders: Whether the model reads pictures or audio. Token types then mark these, and token
            types of zeros change nothing.
        defaults: Defaults of the arguments of ``forward``.
    """
    for name, value in inputs.items():
        if name in _OF_TOKENS or has_no_effect(name) or is_no_input(value):
            continue
        if isinstance(value, (bool, int, float, str)) and value == defaults.get(name):
            continue
        if name == "is_causal" and value is True:
            continue
        if name in _TYPES and has_placeholders and isinstance(value, Tensor) and not bool(value.any()):
            continue
        return name
    if not any(begins) and not _hides_nothing(inputs.get("attention_mask")):
        return "attention_mask"
    if inputs.get("cache_position") is not None and not positions_are_default(
        inputs["cache_position"], past, [0]
    ):
        return "cache_position"
    return None if positions_are_default(inputs.get("position_ids"), past, begins) else "position_ids"


def positions_are_default(positions: Any, past: int, begins: Sequence[int]) -> bool:
    """Whether positions, ``[..., T]``, count on from the tokens in a cache.

    Args:
        positions: Positions of the new tokens; those of padding may be any.
        past: Columns in the cache.
        begins: Column of the first token of each row, which has position 0. If one is not 0, positions must
            be given.
    """
    if not isinstance(positions, Tensor):
        return positions is None and not any(begins)
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not any(begins):
        return bool((positions == expected).all())
    expected = expected - torch.tensor(begins, device=positions.device).unsqueeze(1)
    if positions.ndim > 1 and positions.shape[-2] not in (1, len(begins)):
        return False
    return bool(((positions == expected) | (expected < 0)).all())


def _hides_nothing(mask: Any) -> bool:
    """Whether a mask ``[B, T]`` shows all tokens; true without a mask, false for other shapes and kinds."""
    if mask is None:
        return True
    return isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.all())
