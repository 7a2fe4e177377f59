"""Recorder of the keys that a model's cache stores and the queries that read them, during one forward.

Shapes: B rows, T tokens, H key/value heads, Hq query heads, D head dim.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_IMPLEMENTATION: Final = "kvloom_smoothing"
_INTERNAL: Final = "_attn_implementation_internal"


class KeyRecorder:
    """Stored keys, and sizes of the queries that read them.

    Attributes:
        keys: Keys ``[B, H, T, D]`` by layer.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self._squares: dict[int, list[Tensor]] = {}
        self._returned: list[Tensor] = []  # kept alive, so that their addresses stay unique
        self._layer_of: dict[int, int] = {}
        self._called: set[int | None] = set()

    def cache(self, config: Any) -> DynamicCache:
        """An empty cache whose updates are recorded."""
        return _RecordingCache(config, self)

    def query_power(self, layer: int) -> Tensor | None:
        """Mean squares ``[Hq, D]`` float32 of the queries that read the keys of a layer; ``None`` if none."""
        squares = self._squares.get(layer)
        return torch.stack(squares).mean(0) if squares else None

    def why_no_queries(self, layer: int) -> str:
        """Why ``query_power`` is ``None``."""
        if layer in self._called:
            return "attention reads other keys than the cache keeps"
        return "attention is not called through transformers' interface"

    def stored(self, layer: int, key: Tensor, returned: Tensor) -> None:
        """Record that a cache stored ``key``, and returned ``returned`` for attention."""
        self.keys.setdefault(layer, key.detach())
        self._returned.append(returned)
        self._layer_of[returned.data_ptr()] = layer

    def read(self, module: nn.Module, query: Tensor, key: Tensor) -> None:
        """Record a call of attention; several layers may read one layer's keys, or a copy of them."""
        number = getattr(module, "layer_idx", None)
        self._called.add(number)
        layer = self._layer_of.get(key.data_ptr())
        if layer is None and number in self.keys and _is_copy(key, self.keys[number]):
            layer = number
        if layer is None:
            return
        stored = self.keys[layer]
        if query.shape[-1] == stored.shape[-1] and query.shape[1] % stored.shape[1] == 0:
            self._squares.setdefault(layer, []).append(query[0].detach().float().square().mean(1))


def _is_copy(key: Tensor, stored: Tensor) -> bool:
    """Whether ``key`` equals ``stored``, each head possibly repeated for its query heads."""
    repeats, rest = divmod(key.shape[1], stored.shape[1])
    if rest or key.shape[2:] != stored.shape[2:] or not repeats:
        return False
    return torch.equal(key[0, ::repeats].to(stored.dtype), stored[0])


class _RecordingCache(DynamicCache):  # type: ignore[misc]
    """A cache whose updates are passed to a recorder."""

    def __init__(self, config: Any, recorder: KeyRecorder) -> None:
        super().__init__(config=config)
        self._recorder = recorder

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Update the cache, and record the new keys."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._recorder.stored(layer_idx, key_states, keys)
        return keys, values


_RECORDER: Final[ContextVar[KeyRecorder]] = ContextVar("kvloom_smoothing")
_OWN: Final[dict[int, str]] = {}
"""Original attention implementations of the configurations that are being recorded, by their ids."""


@contextmanager
def recorded(model: nn.Module, recorder: KeyRecorder) -> Iterator[None]:
    """Context in which the recorder sees the calls of the model's attention.

    Results are those of the model's own attention, also in other threads that use the model.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig) and isinstance(vars(config).get(_INTERNAL), str):
            configs[id(config)] = config
    own = {number: vars(config)[_INTERNAL] for number, config in configs.items()}
    _OWN.update(own)
    token = _RECORDER.set(recorder)
    try:
        for config in configs.values():
            setattr(config, _INTERNAL, _IMPLEMENTATION)
        yield
    finally:
        for number, config in configs.items():
            setattr(config, _INTERNAL, own[number])
        _RECORDER.reset(token)


def _own_name(config: Any) -> str:
    return _OWN.get(id(config), "sdpa")


def _own_attention(module: nn.Module) -> Callable[..., Any]:
    """The attention function of a module; eager attention is in the file of its class."""
    name = _own_name(vars(module).get("config"))
    homes = [vars(sys.modules[kind.__module__]) for kind in type(module).__mro__]
    functions = next((x["ALL_ATTENTION_FUNCTIONS"] for x in homes if "ALL_ATTENTION_FUNCTIONS" in x), None)
    functions = ALL_ATTENTION_FUNCTIONS if functions is None else functions
    eager = next((x["eager_attention_forward"] for x in homes if "eager_attention_forward" in x), None)
    found: Callable[..., Any] = functions.get(name, eager)
    return functions["sdpa"] if found is None else found


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Any:
    recorder = _RECORDER.get(None)
    if recorder is not None:
        recorder.read(module, query, key)
    return _own_attention(module)(module, query, key, value, *args, **options)


def _mask(*args: Any, **options: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[_own_name(options.get("config"))](*args, **options)


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, _mask)
