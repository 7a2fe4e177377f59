"""Copy of a text's keys and values between a store and a file in the legacy format.

The file is safetensors with ``past_key_values.{layer}.key`` and ``.value``, ``[1, H, N, D]`` in the model's
dtype, as exported models name them, and ``input_ids`` ``[1, N]``. Shapes as in ``legacy.py``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvloom.core.specs import dtype_name
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.cache.legacy import expect_pairs
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.integrations.transformers.pool.kv_pool import KVPool
from kvloom.integrations.transformers.pool.origin import PoolCache
from kvloom.store.backends import connect, store_url
from kvloom.store.fingerprint import Fingerprint
from kvloom.store.store import KVStore

_Pairs = Sequence[tuple[Tensor, Tensor]]
_SUFFIX = ".safetensors"
_TIMEOUT = 30.0


def exchange(
    source: str,
    target: str,
    model: Any,
    tokens: Sequence[int],
    kv: str = "auto",
    page_size: int = 16,
    salt: str = "",
    key: bytes | None = None,
) -> int:
    """Copy the keys and values of a text between a store and a file.

    Tokens from a store are dequantized, and tokens for a store are quantized, in the format ``kv``.

    Args:
        source: A folder or URL of a store, or a ``.safetensors`` file.
        target: The other of the two.
        model: A ``PreTrainedModel`` all of whose layers attend to the whole sequence.
        tokens: Ids of the text; a prefix of it is copied.
        kv: Cache format in the store.
        page_size: Tokens in a page; only full pages are stored.
        salt: Salt of the text in the store.
        key: Secret key of the store, if it has one.

    Returns:
        Number of tokens in the target.

    Raises:
        ArgumentError: not exactly one of the two is a file; the file has another format, model or text; or
            the store has no page of the text, or cannot be written.
        UnsupportedError: as ``KVPool.for_model``; or layers also keep index keys, which the file cannot hold.
    """
    if any(x.index for x in layers_of(model)):
        raise UnsupportedError(
            f"model must keep keys and values of its tokens and nothing else, got index keys of "
            f"{type(model).__name__}"
        )
    if source.endswith(_SUFFIX) == target.endswith(_SUFFIX):
        raise ArgumentError(
            f"SOURCE or TARGET must be a file {_SUFFIX}, and the other a store, got {source!r}, {target!r}"
        )
    if target.endswith(_SUFFIX):
        pairs = _from_store(source, model, tokens, kv, page_size, salt, key)
        return _save(Path(target), pairs, tokens)
    fingerprint = fingerprint_of(model, kv)
    pairs = _load(Path(source), fingerprint, tokens)
    return _to_store(target, pairs, model, tokens, kv, page_size, salt, key, fingerprint)


def _from_store(
    store: str, model: Any, tokens: Sequence[int], kv: str, page_size: int, salt: str, key: bytes | None
) -> _Pairs:
    connect(store_url(store), _TIMEOUT, create=False)
    with KVStore(store_url(store), read="always", key=key) as opened:
        pool = KVPool.for_model(model, kv, page_size, max_tokens=len(tokens) + page_size, store=opened)
        cache = known_prefix(pool, tokens, salt)
    if cache is None:
        raise ArgumentError(
            f"SOURCE must have the first page of the text for this model, got none in {store}"
        )
    return cache.to_legacy_cache()


def known_prefix(pool: KVPool, tokens: Sequence[int], salt: str) -> PoolCache | None:
    """A cache of the whole pages of a text that a pool or the store below it has; ``None`` without any."""
    # A pool never finds the last token of a text: one is left to compute.
    cache = pool.begin(torch.tensor([[*tokens, 0]], device=pool.model.device), salt)
    return cache if cache.get_seq_length() else None


def _to_store(
    store: str,
    pairs: _Pairs,
    model: Any,
    tokens: Sequence[int],
    kv: str,
    page_size: int,
    salt: str,
    key: bytes | None,
    fingerprint: Fingerprint,
) -> int:
    """Number of tokens that could be read back from the store."""
    count = pairs[0][0].shape[2]
    room = sum(x.nbytes for pair in pairs for x in pair)  # nothing is dropped
    with KVStore(store_url(store), read="always", max_queued=2 * room, key=key) as opened:
        pool = KVPool.for_model(model, kv, page_size, max_tokens=count + page_size, store=opened)
        ids = torch.tensor([tokens[:count]], device=model.device)
        cache = pool.begin_given(ids, salt)  # the file says that the model computed them
        for i, (keys, values) in enumerate(pairs):
            cache.update(keys.to(model.device), values.to(model.device), i)
        pool.commit(cache, ids, salt)
        pool.flush()
        pieces = opened.load(fingerprint, salt, tokens[:count])
    stored = pieces[-1].segment.end if pieces else 0
    if stored < count // page_size * page_size:
        raise ArgumentError(
            f"TARGET must be a store that can be written, got {store}, which has {stored} tokens"
        )
    return stored


def _save(path: Path, pairs: _Pairs, tokens: Sequence[int]) -> int:
    count = pairs[0][0].shape[2]
    tensors = {"input_ids": torch.tensor([tokens[:count]])}
    for i, pair in enumerate(pairs):
        for name, x in zip(_names(i), pair, strict=True):
            tensors[name] = x.contiguous()
    temporary = path.with_name(f".{path.name}.writing")
    try:
        save_file(tensors, temporary)
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise ArgumentError(f"TARGET must be a file that can be written: {error}") from error
    return count


def _load(path: Path, fingerprint: Fingerprint, tokens: Sequence[int]) -> _Pairs:
    """Keys and values of a file, checked to be of this model and text."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArgumentError(f"SOURCE must be a safetensors file: {error}") from error
    ids = tensors.pop("input_ids", None)
    names = [_names(i) for i in range(len(fingerprint.layers))]
    if tensors.keys() != {name for pair in names for name in pair}:
        raise ArgumentError(
            f"SOURCE must have {names[0][0]} to {names[-1][1]}, got {', '.join(sorted(tensors)[:4])} ..."
        )
    pairs = expect_pairs([(tensors[key], tensors[value]) for key, value in names])
    count = pairs[0][0].shape[2]
    if not 0 < count <= len(tokens):
        raise ArgumentError(f"SOURCE must have 1 to {len(tokens)} tokens, those of the text, got {count}")
    if ids is not None and ids.tolist() != [list(tokens[:count])]:
        raise ArgumentError("SOURCE must have the input_ids of the text, got others")
    for layer, pair, named in zip(fingerprint.layers, pairs, names, strict=True):
        for side, x, name in zip(layer.sides, pair, named, strict=True):
            wanted = [1, layer.heads, count, side.head_dim]
            if list(x.shape) != wanted or dtype_name(x.dtype) != fingerprint.dtype:
                raise ArgumentError(
                    f"SOURCE must have {name} {wanted} {fingerprint.dtype}, got {list(x.shape)} "
                    f"{dtype_name(x.dtype)}"
                )
    return pairs


def _names(layer: int) -> tuple[str, str]:
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"
