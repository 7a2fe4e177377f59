"""RoPE frequencies of a vLLM model, and the number of positions for which it has sines and cosines.

Shapes: n frequencies.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

_CACHE: Final = "cos_sin_cache"
_LONG: Final = "long_short_cos_sin_cache"
"""Buffer of LongRoPE: sines and cosines by the factors of short texts, followed by those of long texts."""


def frequencies_of(model: nn.Module) -> list[Tensor]:
    """Distinct frequencies ``[n]`` float64 in the modules of a model, on the CPU.

    They equal those of transformers if vLLM computes them in the same way.
    """
    found: list[Tensor] = []
    for module in model.modules():
        for turns in _of_module(module):
            if not any(torch.equal(turns, other) for other in found):
                found.append(turns)
    return found


def positions_of(model: nn.Module) -> int | None:
    """Number of positions for which all modules have sines and cosines; ``None`` if no module has any."""
    return min((n for module in model.modules() if (n := _positions(module)) is not None), default=None)


def _of_module(module: Any) -> list[Tensor]:
    if isinstance(vars(module)["_buffers"].get(_LONG), Tensor):
        factors = (module.short_factor, module.long_factor)
        return [module._compute_inv_freq(x).double() for x in factors]
    cache = vars(module)["_buffers"].get(_CACHE)
    if not isinstance(cache, Tensor) or cache.dim() != 2 or len(cache) < 2:
        return []
    known, cache = _computed(module, cache)
    cos, sin = cache[1].detach().double().cpu().chunk(2)
    angle = torch.atan2(sin, cos)
    if known is not None and known.shape == angle.shape:
        known = known.detach().double().cpu()
        if torch.allclose(known, angle, rtol=1e-4, atol=0):
            return [known]
    return [angle]


def _computed(module: Any, cache: Tensor) -> tuple[Tensor | None, Tensor]:
    """Frequencies from which a module computes its sines and cosines, and these before rounding."""
    found: list[Tensor] = []
    own = getattr(module, "_compute_inv_freq", None)
    if own is None or not hasattr(module, "_compute_cos_sin_cache"):
        return None, cache

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found.append(own(*args, **kwargs))
        return found[-1]

    vars(module)["_compute_inv_freq"] = noted
    try:
        exact = module._compute_cos_sin_cache()
    except Exception:  # a kind of RoPE that needs arguments
        exact = cache
    finally:
        del vars(module)["_compute_inv_freq"]
    is_like = isinstance(exact, Tensor) and exact.shape == cache.shape
    return found[-1] if found else None, exact if is_like else cache


def _positions(module: Any) -> int | None:
    buffers = vars(module)["_buffers"]
    if isinstance(buffers.get(_LONG), Tensor):
        short = int(module.original_max_position_embeddings)
        return len(buffers[_LONG]) - short if module.use_long_rope else short
    cache = buffers.get(_CACHE)
    return len(cache) if isinstance(cache, Tensor) and cache.dim() == 2 else None
