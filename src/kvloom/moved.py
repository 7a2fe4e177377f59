"""Modules under the names that they had before, for pickles and imports of earlier releases."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_PACKAGE: Final = "kvloom."
_INTO: Final = {
    "caches.layers": "assigning fixed groups index_keys kinds layer paged quantized read_only ring",
    "caches.prefixes": "found states step",
    "caches.rows": "page_slots pages placement row saving sequences",
    "caches.tensors": "absorption chosen memory storage token_index tokens transform",
    "integrations.transformers.attention": "latents masks",
    "integrations.transformers.cache": "build indexed_layers layers pairs stateful_cache",
    "integrations.transformers.fingerprint": "watch",
    "integrations.transformers.models": "cache_argument content loading positions remembered rope"
    " text_config",
    "integrations.transformers.pool": "identity origin",
    "integrations.transformers.session.choices": "penalties prompt_scores sampling",
    "integrations.transformers.session.requests": "agent_sessions groups growing held prefixes store_reads",
    "integrations.transformers.session.steps": "recurrent step",
    "integrations.transformers.states": "grid mixers rollback",
    "integrations.vllm.storing": "folder_weights mover planner recurrent watch",
    "serving.answering": "answers picture_answers picture_chats prompts session vision",
    "serving.endpoints": "agents asking dashboard metrics models response_items responses shapes tokens",
    "serving.protocol": "fields messages pictures readers response_request sampling structured text tools"
    " wanted",
    "store.tiers": "catalog heads limits patience readers tier writer",
}
"""Modules that each package has taken from the package around it, names and all."""
MOVED: Final = {
    "caches.changes": "caches.layer_set",
    "caches.fixed_recent": "caches.layers.ring",
    "caches.prefix": "caches.prefixes.cache",
    "caches.prefix_group": "caches.prefixes.group",
    "integrations.onnx.reference": "integrations.onnx.session",
    "integrations.transformers.batching": "integrations.transformers.session",
    "integrations.transformers.moved": "moved",
    "integrations.transformers.pool.memory": "integrations.transformers.pool.remembered",
    "integrations.transformers.pool_memory": "integrations.transformers.pool.remembered",
    "integrations.transformers.pool_prefixes": "integrations.transformers.pool.prefixes",
    "integrations.transformers.pool_states": "integrations.transformers.pool.states",
    "integrations.transformers.session.plan": "integrations.transformers.session.steps.step",
    "integrations.transformers.session.sizes": "integrations.transformers.session.requests.groups",
    "integrations.transformers.state_logs": "integrations.transformers.states.logs",
    "integrations.vllm.latents": "integrations.vllm.latent.step",
    "paging.states": "paging.recorded_states",
    "store.index_objects": "store.index",
    "store.probe": "store.fingerprint",
    "store.room": "store.tiers.limits",
    "store.speed": "store.tiers.patience",
    "store.threads": "store.tiers.readers",
} | {
    f"{package.rpartition('.')[0]}.{name}": f"{package}.{name}"
    for package, names in _INTO.items()
    for name in names.split()
}
"""Name of each module or package of today, by the one that a pickle or a document may have."""


class _Moved(MetaPathFinder, Loader):
    """Finder of modules by their earlier names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a moved module, or of a part of a moved package."""
        if not fullname.startswith(_PACKAGE):
            return None
        name, rest = fullname.removeprefix(_PACKAGE), ""
        while name not in MOVED:
            name, _, last = name.rpartition(".")
            if not name:
                return None
            rest = f".{last}{rest}"
        now = import_module(_PACKAGE + MOVED[name] + rest)
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
