"""Cache formats of the layers of one model, saved as a file."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvloom.caches import CacheFormat
from kvloom.caches.format import kept_as
from kvloom.core.spelling import parse_kind
from kvloom.errors import ArgumentError

_FORMAT: Final = "kvloom-plan/1"
_WITHOUT_EFFECT: Final = frozenset(
    {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"}
)


@dataclass(frozen=True, slots=True)
class BitPlan:
    """Kinds of keys and of values, layer by layer.

    Attributes:
        config: ``config_digest`` of the plan's model.
        layers: Format strings of keys and of values of each layer, as ``kv`` and ``values`` of
            ``KVCache.for_model``.
        nbytes_per_token: Cache bytes of one token in all layers, scales included.
        error: Root mean square error of attention's output over all heads. Each side of each layer is
            measured alone, and the squares are added.
        recent: Residual window: the last tokens that each token attends to unquantized, in layers that keep
            codes. Their bytes are not part of ``nbytes_per_token``.
    """

    config: str
    layers: tuple[tuple[str, str], ...]
    nbytes_per_token: float
    error: float
    recent: int = 0

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; equal plans give equal bytes."""
        fields = {
            "format": _FORMAT,
            "config": self.config,
            "nbytes_per_token": self.nbytes_per_token,
            "error": self.error,
            "recent": self.recent,
            "layers": [{"keys": keys, "values": values} for keys, values in self.layers],
        }
        Path(path).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, name: str = "path") -> "BitPlan":
        """Read a plan that ``save`` wrote.

        Args:
            path: The file.
            name: Name of the caller's argument in the error.

        Raises:
            ArgumentError: the file is no such plan.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            if fields["format"] != _FORMAT:
                raise ArgumentError(f"{name} must be a plan of {_FORMAT}, got {fields['format']!r}")
            layers = tuple((str(layer["keys"]), str(layer["values"])) for layer in fields["layers"])
            nbytes, error = float(fields["nbytes_per_token"]), float(fields["error"])
            return cls(str(fields["config"]), layers, nbytes, error, int(fields.get("recent", 0)))
        except (OSError, ValueError, KeyError, TypeError) as cause:
            if isinstance(cause, ArgumentError):
                raise
            raise ArgumentError(f"{name} must be a plan that kvloom saved: {cause!r:.200}") from None

    def format(self, name: str, base: CacheFormat) -> CacheFormat:
        """``base`` with the formats of the plan's layers.

        Args:
            name: Name of the caller's argument in the error for an invalid format string.
            base: Page size and other settings.
        """
        layers = []
        for keys, values in self.layers:
            if any(parse_kind(name, x).recent is not None for x in (keys, values)):
                raise ArgumentError(f"{name} must be a plan whose kinds say nothing of recent, got {keys!r}")
            sides = (kept_as(name, keys, "keys"), kept_as(name, values, "values"))
            key, value = (CacheFormat(dtype, quant) for dtype, quant in sides)
            layers.append(replace(key, values=value))
        recent = self.recent if any(x.has_codes for x in layers) else 0
        return replace(base, layers=tuple(layers), recent=recent)


def config_digest(config: Any) -> str:
    """Digest, 64 hex digits, of all fields of a configuration that change keys and values."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _WITHOUT_EFFECT}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()
