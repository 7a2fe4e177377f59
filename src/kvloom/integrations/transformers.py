"""A kvloom paged cache for Hugging Face ``generate()``. The only file that imports transformers."""

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextStreamer, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from kvloom.caches import PagedBatch, PagedFormat, PagedLayer
from kvloom.core.specs import QuantSpec
from kvloom.errors import ArgumentError, StateError, UnsupportedError

STORAGE: Final = ("auto", "float32", "float16", "bfloat16", "int8", "int4")
"""Values of ``kv``: the model's own dtype, a float dtype, or quantised."""

_LOG: Final = logging.getLogger("kvloom")

# Layers without keys of their own, in transformers that have them.
DummyLayer: Final = getattr(cache_utils, "DummyLayer", type(None))

# Until transformers 5.12 ``crop(n)`` kept n tokens; since then ``crop(-n)`` removes n.
_CROP_KEEPS: Final = "tokens_to_remove" not in inspect.signature(Cache.crop).parameters


class KVCache(DynamicCache):  # type: ignore[misc]
    """A cache for ``generate(past_key_values=...)`` and ``model(past_key_values=...)`` kept in kvloom pages.

    Attention receives the same tensors as from ``DynamicCache``, dequantised where the cache is quantised.
    Values are stored detached: it is for inference. Beams, forks and repeated rows share pages; a page is
    copied when one of its holders writes it, so reordering and forking move no keys or values.
    """

    def __init__(self, layers: list[CacheLayerMixin], batch: PagedBatch) -> None:
        Cache.__init__(self, layers=layers)
        self.batch = batch
        self.is_frozen = False

    @classmethod
    def for_model(
        cls,
        model: Any,
        kv: str = "auto",
        quant_group: int = 64,
        page_size: int = 16,
        max_tokens: int | None = None,
    ) -> "KVCache":
        """An empty cache for ``model``.

        Args:
            model: A ``PreTrainedModel`` that generates. Layers that attend to the whole sequence are kept in
                kvloom pages; others (sliding windows, recurrent states) in transformers' own layers, which a
                WARNING names. Of an encoder-decoder model this is the decoder's own half, for
                ``EncoderDecoderCache``.
            kv: How keys and values are kept, one of ``STORAGE``.
            quant_group: Elements along the head dim that share a float16 scale (int8 and int4).
            page_size: Tokens in a page.
            max_tokens: Token slots of each layer, all sequences together; ``None`` grows on demand.

        Raises:
            ArgumentError: ``kv`` is unknown or ``quant_group`` does not divide the head dim.
            UnsupportedError: no layer of the model attends to the whole sequence.
        """
        if kv not in STORAGE:
            raise ArgumentError(f"kv must be one of {STORAGE}, got {kv!r}")
        config = model.config.get_text_config(decoder=True)
        quant = QuantSpec({"int8": 8, "int4": 4}[kv], quant_group) if kv in ("int8", "int4") else None
        head_dim = head_dim_of(config)
        if quant is not None and head_dim % quant_group and not hasattr(config, "kv_lora_rank"):
            raise ArgumentError(f"quant_group must divide the head dim {head_dim}, got {quant_group}")
        dtype = None if quant is not None or kv == "auto" else getattr(torch, kv)
        batch = PagedBatch(PagedFormat(dtype, quant, page_size, max_tokens))
        layers = [
            KVCacheLayer(batch, i) if type(layer) is DynamicLayer else layer
            for i, layer in enumerate(DynamicCache(config=config).layers)
        ]
        kinds = getattr(config, "layer_types", None) or []
        for layer, kind in zip(layers, kinds, strict=False):
            if isinstance(layer, KVCacheLayer) and kind != "full_attention":
                raise UnsupportedError(
                    f"model must have layers that this version's DynamicCache serves, got {kind!r} in "
                    f"{type(model).__name__} with transformers {transformers.__version__}"
                )
        others = Counter(type(x).__name__ for x in layers if not isinstance(x, KVCacheLayer | DummyLayer))
        if others.total() == len(layers):
            raise UnsupportedError(
                f"model must have a layer that attends to the whole sequence, got {type(model).__name__} "
                f"with {dict(others)}"
            )
        if others:
            _LOG.warning(
                "%d of %d layers keep transformers' own storage: %s",
                others.total(),
                len(layers),
                dict(others),
            )
        return cls(layers, batch)

    @property
    def nbytes(self) -> int:
        """Bytes allocated in the paged layers, scales included."""
        return sum(layer.pages.nbytes for layer in self._paged_layers)

    @property
    def nbytes_per_token(self) -> float:
        """Bytes that one token takes in the paged layers, scales included; 0 before the first token."""
        return sum(layer.pages.nbytes_per_token for layer in self._paged_layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[B, H, Q, D]`` in a layer and return everything stored there, ``[B, H, N, D]``."""
        self._expect_thawed()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def fork(self) -> "KVCache":
        """A cache of the same tokens on the same pages, not frozen; neither sees what the other stores."""
        batch = self.batch.fork()
        layers = [x.fork(batch) if isinstance(x, KVCacheLayer) else copy.deepcopy(x) for x in self.layers]
        return type(self)(layers, batch)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVCache":
        return self.fork()

    def freeze(self) -> "KVCache":
        """Refuse every change from now on, so that forks start from the same tokens; returns the cache."""
        self.is_frozen = True
        return self

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist(), "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times in a row."""
        rows = [row for row in range(self.batch.size) for _ in range(repeats)]
        self._select(rows, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at ``indices``, or where a bool mask is true."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist(), "batch_select_indices", rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; up to 5.12 a positive number is what is kept."""
        self._expect_thawed()
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; the next ones may be of another batch size."""
        self._expect_thawed()
        super().reset()

    @property
    def _paged_layers(self) -> list["KVCacheLayer"]:
        return [layer for layer in self.layers if isinstance(layer, KVCacheLayer)]

    def _select(self, rows: list[int], verb: str, argument: Tensor | int) -> None:
        """Move the tables of all paged layers at once, the tensors of others by their own ``verb``."""
        self._expect_thawed()
        for row in rows:
            if not -self.batch.size <= row < self.batch.size:
                raise ArgumentError(f"rows must be in [0, {self.batch.size}), got {row}")
        self.batch.select(rows)
        for layer in self.layers:
            if not isinstance(layer, KVCacheLayer | DummyLayer):
                getattr(layer, verb)(argument)

    def _expect_thawed(self) -> None:
        if self.is_frozen:
            raise StateError("this cache is frozen: use a fork of it, cache.fork()")


class KVCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a ``KVCache``, as transformers 4.57 to 5.23 call it."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, batch: PagedBatch, index: int) -> None:
        super().__init__()
        self.pages = PagedLayer(batch.format, batch, index)
        self.dtype: torch.dtype | None = None

    def fork(self, batch: PagedBatch) -> "KVCacheLayer":
        """This layer over a fork of its batch."""
        layer = KVCacheLayer(batch, self.pages.index)
        layer.pages.num_tokens = self.pages.num_tokens
        if self.dtype is not None:
            layer.dtype, layer.device, layer.is_initialized = self.dtype, self.device, True
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Remember the dtype that attention computes in; pages are taken when tokens arrive."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store ``[B, H, Q, D]`` and return everything stored, ``[B, H, N, D]``."""
        if self.dtype is None:
            self.lazy_initialization(key_states, value_states)
        self.pages.append(key_states, value_states)
        return self.pages.gather(key_states.dtype)

    def get_seq_length(self) -> int:
        """Tokens of each sequence."""
        return self.pages.num_tokens

    def get_max_length(self) -> int:
        """-1: no limit that the mask must know."""
        return -1

    def get_max_cache_shape(self) -> int:
        """``get_max_length`` as transformers up to 5.18 calls it."""
        return -1

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and first position of what ``update`` will return; up to 5.3 called with positions."""
        new = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.pages.num_tokens + new, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; up to 5.12 a positive number is what is kept."""
        tokens_to_remove = int(tokens_to_remove)  # some versions pass a 0-d tensor
        if tokens_to_remove < 0:
            self.pages.truncate(max(0, self.pages.num_tokens + tokens_to_remove))
        elif _CROP_KEEPS:
            self.pages.truncate(min(self.pages.num_tokens, tokens_to_remove))
        elif tokens_to_remove > 0:
            raise ArgumentError(f"tokens_to_remove must be at most 0, got {tokens_to_remove}")

    def reset(self) -> None:
        """Forget all tokens."""
        self.pages.reset()
        self.is_initialized, self.dtype = False, None

    @property
    def keys(self) -> Tensor | None:
        """All keys ``[B, H, N, D]``, gathered at each access."""
        return None if self.dtype is None else self.pages.gather(self.dtype)[0]

    @keys.setter
    def keys(self, _: Tensor | None) -> None:
        """The base class assigns ``None``; pages are the only storage."""

    @property
    def values(self) -> Tensor | None:
        """All values ``[B, H, N, D]``, gathered at each access."""
        return None if self.dtype is None else self.pages.gather(self.dtype)[1]

    @values.setter
    def values(self, _: Tensor | None) -> None:
        """The base class assigns ``None``; pages are the only storage."""

    def _refuse(self, *args: Any) -> None:
        raise UnsupportedError("a layer of a KVCache shares its rows with the others: call the cache")

    reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


def head_dim_of(config: Any) -> int:
    """Elements of a head vector of a text model, which not every configuration states."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load_model(
    path: str | Path, dtype: torch.dtype | None = None, *, progress: bool = True
) -> tuple[Any, Any]:
    """Load ``(model, tokenizer)`` of a causal language model from a local folder; never downloads.

    Args:
        path: The folder.
        dtype: Of the weights and of the computation; that of the file if ``None``.
        progress: Show a bar while weights are loaded.

    Raises:
        ArgumentError: ``path`` is no folder with a ``config.json``.
    """
    if not (Path(path) / "config.json").is_file():
        raise ArgumentError(f"model must be a local folder with a config.json, got {str(path)!r}")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    shown = is_progress_bar_enabled()
    if not progress:
        disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype or "auto")
    finally:
        if shown:
            enable_progress_bar()
    return model.eval(), tokenizer


class Streamer(TextStreamer):  # type: ignore[misc]
    """Hands decoded text to ``write`` as tokens come, whole characters only."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each piece of text that will not change any more."""
        self._write(text)
