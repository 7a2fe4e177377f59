"""Modules under the names that they had before, for pickles and imports of earlier releases."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_PACKAGE: Final = "kvloom.integrations.transformers."
_MOVED: Final = {
    "batching": "session",
    "build": "cache.build",
    "cache_argument": "models.cache_argument",
    "content": "models.content",
    "grid": "states.grid",
    "identity": "pool.identity",
    "indexed_layers": "cache.indexed_layers",
    "latents": "attention.latents",
    "layers": "cache.layers",
    "loading": "models.loading",
    "masks": "attention.masks",
    "mixers": "states.mixers",
    "origin": "pool.origin",
    "pairs": "cache.pairs",
    "pool_memory": "pool.memory",
    "pool_prefixes": "pool.prefixes",
    "pool_states": "pool.states",
    "positions": "models.positions",
    "remembered": "models.remembered",
    "rollback": "states.rollback",
    "rope": "models.rope",
    "state_logs": "states.logs",
    "stateful_cache": "cache.stateful_cache",
    "text_config": "models.text_config",
    "watch": "fingerprint.watch",
}
"""Name of each moved module or package that a pickle or a document may name."""


class _Moved(MetaPathFinder, Loader):
    """Finder of modules by their earlier names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a moved module."""
        if not fullname.startswith(_PACKAGE):
            return None
        first, *rest = fullname.removeprefix(_PACKAGE).split(".")
        if first not in _MOVED:
            return None
        now = import_module(".".join([_PACKAGE + _MOVED[first], *rest]))
        return ModuleSpec(fullname, self, loader_state=(now, now.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, not a copy of it."""
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again, which the import has replaced."""
        if module.__spec__ is not None and isinstance(module.__spec__.loader, _Moved):
            module.__spec__ = module.__spec__.loader_state[1]


def find_moved() -> None:
    """Let imports find moved modules by their earlier names."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())  # before those that would find a part of a moved package once more
