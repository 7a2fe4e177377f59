"""RoPE as rotations of pairs of channels, and a search for the rotation that explains given keys.

Shapes: B rows, H key/value heads, T tokens, D head dim, P pairs of channels, n frequencies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_NAMES: Final = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "rotary_dim",
    "rotary_pct",
    "rotary_emb_base",
    "partial_rotary_factor",
)
"""Attributes by which configurations name RoPE."""
_MISMATCH: Final = 0.05
"""Largest mismatch with which a rotation explains keys; that of unrelated keys is 1."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Pairs of channels that are rotated by an angle that grows with the position.

    Attributes:
        channels: ``[P, 2]`` int64, distinct.
        frequencies: ``[P]`` float64, radians per position.
    """

    channels: Tensor
    frequencies: Tensor

    def turned(self, pairs: Tensor, positions: Tensor) -> Tensor:
        """Pairs ``[..., T, P, 2]``, rotated by positions ``[T]``."""
        angle = positions.double()[:, None] * self.frequencies
        cos, sin = angle.cos().float(), angle.sin().float()
        x, y = pairs.unbind(-1)
        return torch.stack((x * cos - y * sin, x * sin + y * cos), dim=-1)

    def pairs(self, key: Tensor) -> Tensor:
        """Pairs ``[..., T, P, 2]`` of keys ``[..., T, D]``."""
        found: Tensor = key[..., self.channels]
        return found

    def before(self, key: Tensor) -> Tensor:
        """Pairs ``[..., T, P, 2]`` before RoPE, of keys ``[..., T, D]`` at positions 0 to T - 1."""
        return self.turned(self.pairs(key), -torch.arange(key.shape[-2], device=key.device))

    def mismatch(self, key: Tensor, shift: int) -> Tensor:
        """``[H, P]``, the part of keys that the rotation by ``shift`` does not explain, 0 to about 1.

        Args:
            key: ``[2, H, T, D]``, keys of the same tokens at positions that differ by ``shift``.
            shift: The difference of positions.
        """
        first, second = self.pairs(key)
        steps = torch.full((key.shape[2],), shift, device=key.device)
        error = (self.turned(first, steps) - second).square().sum(-1)
        size = (first.square() + second.square()).sum(-1).mean(1, keepdim=True)
        # The median, since a few tokens may go to other experts in a mixture of experts.
        found: Tensor = (error / size.clamp(min=1e-30)).median(dim=1).values
        return found


def constant(head_dim: int, device: torch.device) -> Rotation:
    """Rotation of keys without RoPE: adjacent channels are pairs that are not rotated."""
    channels = torch.arange(head_dim // 2 * 2, device=device).view(-1, 2)
    return Rotation(channels, torch.zeros(len(channels), dtype=torch.float64, device=device))


def rotation_of(key: Tensor, turns: Sequence[Tensor], shift: int) -> tuple[Rotation, Tensor] | None:
    """The rotation that explains keys best, and the pairs that it explains, ``[H, P]`` bool.

    Args:
        key: ``[2, H, T, D]`` float32, keys of the same tokens at positions that differ by ``shift``.
        turns: Frequencies ``[n]`` that the model has.
        shift: The difference of positions.

    Returns:
        ``None`` if neither these frequencies nor no rotation explain the keys.
    """
    tried = [(x, x.mismatch(key, shift)) for x in _candidates(key.shape[-1], turns, key.device)]
    best, mismatch = min(tried, key=lambda each: float(each[1].mean()))
    return (best, mismatch < _MISMATCH) if float(mismatch.mean()) < _MISMATCH else None


def frequencies_of(model: nn.Module) -> list[Tensor]:
    """Distinct frequencies ``[n]`` float64 in the modules of a model, on the CPU."""
    found: list[Tensor] = []
    for module in model.modules():
        for name, x in (*module._buffers.items(), *vars(module).items()):
            turns = _frequencies(name, x) if isinstance(x, Tensor) and x.device.type != "meta" else None
            if turns is not None and not any(torch.equal(turns, other) for other in found):
                found.append(turns)
    return found


def names_rope(model: Any) -> bool:
    """Whether a model's configuration says that it has RoPE."""
    config = model.config.get_text_config(decoder=True)
    return any(getattr(config, name, None) is not None for name in _NAMES)


def _frequencies(name: str, x: Tensor) -> Tensor | None:
    """Frequencies ``[n]`` in a tensor of a module, by its name; ``None`` if it has none."""
    if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and x.dim() == 1:
        return x.detach().double().cpu()
    if name == "embed_positions" and x.dim() == 2 and len(x) > 1:  # sines and cosines of each position
        sin, cos = x[1].detach().double().cpu().chunk(2)
        return torch.atan2(sin, cos)
    return None


def _candidates(head_dim: int, turns: Sequence[Tensor], device: torch.device) -> Iterator[Rotation]:
    """Possible rotations of the first or the last channels of a head; the others are not rotated."""
    yield constant(head_dim, device)
    for frequencies in turns:
        n = len(frequencies)
        if not 0 < 2 * n <= head_dim:
            continue
        for start in sorted({0, head_dim - 2 * n}):
            channels = torch.arange(start, start + 2 * n)
            rest = torch.tensor([i for i in range(head_dim) if not start <= i < start + 2 * n])
            rest = rest[: len(rest) // 2 * 2].long().view(-1, 2)
            for pairs in (channels.view(2, n).T, channels.view(n, 2)):
                still = torch.zeros(len(rest), dtype=torch.float64)
                yield Rotation(
                    torch.cat((pairs, rest)).to(device), torch.cat((frequencies, still)).to(device)
                )
