"""Whose keys and values a vLLM engine computes: the fingerprint that transformers gives the same model."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.identity import fingerprint_with, weights_digest
from kvloom.store.fingerprint import Fingerprint, LayerFormat


def identify(
    path: str, revision: str | None, dtype: torch.dtype, attention: str, layers: tuple[LayerFormat, ...]
) -> Fingerprint:
    """The fingerprint of a model, each of whose weights is read once.

    Args:
        path: Its folder, or its name on the Hub, of which this machine has a copy.
        revision: Of that name.
        dtype: That it computes in.
        attention: Which tokens a token sees.
        layers: How each layer keeps its tokens, all heads.

    Raises:
        UnsupportedError: the folder has no safetensors, or they are not the weights of its configuration.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, revision=revision, local_files_only=True))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    model.tie_weights()
    with ExitStack() as stack:
        saved: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            saved |= dict.fromkeys(opened.keys(), opened)
        return fingerprint_with(model, weights_digest(_Weights(model, saved)), attention, layers)


class _Weights(Mapping[str, Tensor]):
    """``state_dict()`` of a model as it would be with its weights in memory, one tensor at a time.

    Args:
        model: Without weights.
        saved: The open file of each tensor.

    Raises:
        UnsupportedError: a weight is in no file.
    """

    def __init__(self, model: Any, saved: Mapping[str, Any]) -> None:
        self._saved = saved
        self._shapes = model.state_dict()
        names: dict[int, list[str]] = {}  # of each tensor: tied ones have several, of which one is saved
        for name, weight in self._all(model):
            names.setdefault(id(weight), []).append(name)
        same = {name: alike for alike in names.values() for name in alike}
        self._sources = {}
        for name in self._shapes:
            source = next((x for x in same.get(name, [name]) if x in saved), None)
            if source is None:
                raise UnsupportedError(
                    f"model must have all weights of its configuration in safetensors for a store, got none "
                    f"for {name}"
                )
            self._sources[name] = source

    def __getitem__(self, name: str) -> Tensor:
        source, shape = self._sources[name], self._shapes[name]
        weight: Tensor = self._saved[source].get_tensor(source)
        if weight.shape != shape.shape:
            raise UnsupportedError(f"{name} must have shape {list(shape.shape)}, got {list(weight.shape)}")
        return weight.to(shape.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    @staticmethod
    def _all(model: Any) -> Iterator[tuple[str, Tensor]]:
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)
