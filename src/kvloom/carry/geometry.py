"""What no file says of a cache: heads, head dims, windows, latents and RoPE of each layer."""

from dataclasses import dataclass
from itertools import pairwise

from kvloom.carry.carried import CarriedCache
from kvloom.errors import ArgumentError


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one layer.

    Attributes:
        heads: Key/value heads.
        key_dim: Elements of a key, or of a latent.
        value_dim: Elements of a value, or of a rope key beside a latent.
        rotary: Elements that RoPE turns: the first of a key, or all of a rope key beside a latent; 0 without
            RoPE.
        window: Tokens that a token sees, itself included; ``None`` for all before it.
        has_latents: Whether the layer keeps latents and rope keys.

    Raises:
        ArgumentError: a number is none that a layer can have.
    """

    heads: int
    key_dim: int
    value_dim: int
    rotary: int
    window: int | None = None
    has_latents: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} must be at least 1, got {getattr(self, name)}")
        turned = self.value_dim if self.has_latents else self.key_dim
        if not 0 <= self.rotary <= turned or self.rotary % 2:
            raise ArgumentError(f"rotary must be even and at most {turned}, got {self.rotary}")
        if self.window is not None and self.window < 2:
            raise ArgumentError(f"window must be at least 2, got {self.window}")


@dataclass(frozen=True)
class CacheGeometry:
    """Sizes of all layers, in the model's order.

    Attributes:
        layers: Sizes of each layer.
        architecture: ``model_type`` of transformers' configuration; empty if unknown.

    Raises:
        ArgumentError: there is no layer, or layers have windows of several lengths.
    """

    layers: tuple[LayerGeometry, ...]
    architecture: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ArgumentError("layers must be those of a model, got none")
        windows = sorted({x.window for x in self.layers if x.window is not None})
        if any(x != y for x, y in pairwise(windows)):
            raise ArgumentError(f"layers must have windows of one length, got {windows}")

    @classmethod
    def uniform(
        cls, layers: int, heads: int, head_dim: int, architecture: str = "", *, rotary: int | None = None
    ) -> "CacheGeometry":
        """Layers of one size that see all tokens; ``rotary`` is the head dim if not given."""
        rotary = head_dim if rotary is None else rotary
        return cls((LayerGeometry(heads, head_dim, head_dim, rotary),) * layers, architecture)


def expect_layers(cache: CarriedCache, geometry: CacheGeometry) -> None:
    """Raise ArgumentError unless a cache has the layers of a model."""
    if len(cache.layers) != len(geometry.layers):
        raise ArgumentError(f"cache must have {len(geometry.layers)} layers, got {len(cache.layers)}")
    for i, (layer, sizes) in enumerate(zip(cache.layers, geometry.layers, strict=True)):
        wanted = (sizes.heads, sizes.key_dim, sizes.value_dim, sizes.window, sizes.has_latents)
        has = (layer.keys.heads, layer.keys.head_dim, layer.values.head_dim, layer.window, layer.has_latents)
        if has != wanted:
            raise ArgumentError(
                f"cache must have heads, key dim, value dim, window and latents {wanted} in layer {i}, got "
                f"{has}"
            )
