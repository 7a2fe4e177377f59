"""The state of a model: everything that decides keys and values and can change while a process runs.

It includes weights and buffers, active adapters and their scaling, hooks, attributes and configurations, and
the settings of torch in which a model computes.
"""

import logging
from collections.abc import Iterator, Mapping
from itertools import chain
from operator import is_
from typing import Any, Final

from torch import Tensor, nn

from kvloom.integrations.tensor_state import (
    address_of,
    sample_at,
    sample_on_devices,
    sample_place,
    version_of,
)
from kvloom.integrations.transformers.fingerprint.context import context_of
from kvloom.integrations.transformers.fingerprint.module_reader import ModuleReader
from kvloom.integrations.transformers.fingerprint.reading import digest_of
from kvloom.store.sums import checksum

_LOG: Final = logging.getLogger("kvloom")
_CONTEXT: Final = "torch"
_DEFAULTS: Final = "as in a new process"


class ModelWatch:
    """Watch that gives each state of a model a name.

    A model that returns to earlier attributes, hooks and adapters has their name again. After weights were
    written it always has a new name, since rounding may have changed weights that were written back.

    Changes of weights are noticed by their addresses, by the versions that torch counts, and by a sample of
    their bytes, since torch does not count writes through ``.data`` and by fused optimizers.

    Args:
        model: A module, which is kept alive.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._names: dict[tuple[str, str], str] = {}
        self._models: dict[str, str] = {}  # digests of the model without settings of torch, by states
        self._current = ""
        self._context = context_of(model)
        self._epoch = 0
        self._weights: list[Any] = []
        self._lines: dict[str, str] = {}
        self._opaque: dict[int, tuple[int, object]] = {}
        self._read()

    def state(self) -> str:
        """Name of the present state, empty for the first one; takes microseconds if nothing changed."""
        if not self._is_same() or self._sample() != self._samples:
            self._read()
        return self._named()

    def has(self, module: nn.Module) -> bool:
        """Whether a module is a part of the model, or has a part of it."""
        return id(module) in self._modules or any(id(x) in self._modules for x in module.modules())

    def quick_state(self) -> str:
        """As ``state``, but without the sample of bytes; for each forward between two calls of ``state``."""
        return self._named() if self._is_same() else self.state()

    def is_unchanged_since(self, state: str) -> bool:
        """Whether the model is as in a state, whatever the settings of torch are now."""
        self.state()
        return self._models[state] == self._digest

    def _named(self) -> str:
        """Name of the model as it was read, in the present settings of torch."""
        values = self._context.values()
        if values != self._settings:
            self._name(values, self._lines)
        return self._current

    def _is_same(self) -> bool:
        """Whether all values are the same objects, and all tensors have the same versions and addresses."""
        return (
            list(map(len, self._containers)) == self._lengths
            and self._has_values()
            and list(map(version_of, self._tensors)) == self._versions
            and list(map(address_of, self._tensors)) == self._addresses
        )

    def _has_values(self) -> bool:
        try:
            return all(map(is_, self._values, self._present()))
        except KeyError:  # one attribute was removed and another added
            return False

    def _present(self) -> Iterator[Any]:
        return chain.from_iterable(get() for get in self._getters)

    def _read(self) -> None:
        """Read the whole model, and name its state."""
        reader = ModuleReader(opaque=self._opaque)
        self._modules = set(map(id, self.model.modules()))
        lines = sorted(reader.read_model(self.model))
        self._containers, self._getters = reader.containers, reader.getters
        self._lengths, self._values = list(map(len, self._containers)), list(self._present())
        self._tensors, self._arrays = reader.tensors, reader.arrays
        self._versions = list(map(version_of, self._tensors))
        self._addresses = list(map(address_of, self._tensors))
        self._places = [place for x in self._tensors if (place := sample_place(x)) is not None]
        self._samples = self._sample()
        weights: list[list[Any]] = [self._tensors, self._versions, self._addresses, self._samples]
        if self._weights and not _are_alike(self._weights, weights):
            self._epoch += 1
        self._weights = weights
        self._digest = digest_of(repr((self._epoch, lines)))
        self._context = context_of(self.model)  # of the devices where it is now
        self._name(self._context.values(), dict(lines))

    def _name(self, values: list[Any], lines: dict[str, str]) -> None:
        """Name the state of a model that was read as ``lines``, with settings of torch."""
        text = self._context.text()
        self._settings, lines = values, {**lines, _CONTEXT: text or _DEFAULTS}
        is_first = not self._names
        name = "" if is_first else digest_of(f"{self._digest} {text}")
        name = self._names.setdefault((self._digest, text), name)
        self._models[name] = self._digest
        if name != self._current:
            _LOG.info(
                "%s changed, and what it computes from now on is kept apart: %s",
                type(self.model).__name__,
                _difference(self._lines, lines) or "its weights were written",
            )
        self._current, self._lines = name, lines

    def _sample(self) -> list[bytes]:
        sampled = [sample_at(*place) for place in self._places]
        sampled += [checksum(x.tobytes()) for x in self._arrays]
        away = [x for x in self._tensors if x.device.type not in ("cpu", "meta") and type(x.data) is Tensor]
        return sampled + sample_on_devices(away)


def _are_alike(old: list[list[Any]], new: list[list[Any]]) -> bool:
    tensors = len(old[0]) == len(new[0]) and all(map(is_, old[0], new[0]))
    return tensors and old[1:] == new[1:]


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The first thing in which two descriptions differ."""
    for path in (*new, *old):
        if old.get(path) != new.get(path):
            return f"{path} was {_short(old.get(path))}, is {_short(new.get(path))}"
    return ""


def _short(text: str | None) -> str:
    text = text or "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."
