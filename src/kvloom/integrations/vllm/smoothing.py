"""Key smoothing in vLLM: a model is calibrated as in transformers, once it has its weights.

The smoothing stays that of the loaded weights, even if weights are written later, since stored pages use it.
It is correct for any weights.
"""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.transformers_utils.config import try_get_generation_config
from vllm.utils.torch_utils import set_default_torch_dtype

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.models.loading import summary_of
from kvloom.integrations.transformers.smoothing.fitting import LayerSmoothing, fit
from kvloom.integrations.transformers.smoothing.inputs import longest_of, rows, token_ids
from kvloom.integrations.transformers.smoothing.rotations import names_rope
from kvloom.integrations.vllm.blocks import heads_of
from kvloom.integrations.vllm.frequencies import frequencies_of, positions_of
from kvloom.integrations.vllm.recording import Recording
from kvloom.ops import KeyOffset, KeySmoothing


def calibrate(config: Any, model: nn.Module, owners: Mapping[str, str]) -> dict[str, LayerSmoothing]:
    """The smoothing of each attention layer, for all heads of all ranks; the same on each rank.

    Errors of the model are never raised: then no layer has any smoothing, and the reason says why.

    Args:
        config: vLLM's configuration.
        model: The model with its weights.
        owners: For each attention layer by its name, the layer whose keys it reads.
    """
    try:
        with (
            torch.no_grad(),
            set_default_torch_dtype(torch.float32),
            torch.compiler.set_stance("force_eager"),
        ):
            _refuse_parts(config)
            turns = frequencies_of(model)
            recording, shift = _read(config, model, list(owners), turns)
            still = not turns and not names_rope(SimpleNamespace(config=config.model_config.hf_config))
            kept = sorted(set(owners.values()))
            total = config.model_config.get_total_num_kv_heads()
            gathered = {name: _gathered(recording, name, total) for name in kept}
            ranks, found = get_tp_group(), None
            if ranks.rank_in_group == 0:  # other ranks might round differently
                found = {name: _fitted(*gathered[name], turns, shift, still) for name in kept}
            found = ranks.broadcast_object(found, src=0)
    except Exception as error:  # whatever a model raises on tokens that are no text
        return dict.fromkeys(owners, LayerSmoothing(None, f"calibration failed: {summary_of(error)}"))
    return {name: found[owner] for name, owner in owners.items()}


def of_rank(smoothing: KeySmoothing) -> KeySmoothing:
    """The smoothing of this rank's heads, given that of all heads."""
    ranks = get_tp_group()
    return of_heads(smoothing, heads_of(len(smoothing.gain), ranks.rank_in_group, ranks.world_size))


def of_heads(smoothing: KeySmoothing, heads: range) -> KeySmoothing:
    """The smoothing of some heads alone."""
    own, offset = slice(heads.start, heads.stop), smoothing.offset
    if offset is not None:
        mean, channels, frequencies = offset.mean[own], offset.channels[own], offset.frequencies[own]
        offset = KeyOffset(mean, channels, frequencies, offset.head_dim)
    return KeySmoothing(smoothing.gain[own], offset)


def said_of(found: Mapping[str, LayerSmoothing]) -> str:
    """Text with the reasons of all layers, and the number of layers for each."""
    counted = Counter(layer.reason for layer in found.values())
    return "; ".join(f"{reason} in {n} layer{'s' if n > 1 else ''}" for reason, n in counted.items())


def _refuse_parts(config: Any) -> None:
    """Refuse a model whose forward this process cannot compute alone or with its tensor parallel ranks."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedError(f"pipeline_parallel_size must be 1, got {parallel.pipeline_parallel_size}")
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise UnsupportedError(f"data_parallel_size must be 1, got {parallel.data_parallel_size}")
    if config.model_config.is_hybrid:  # their states would be zeros, or fail
        raise UnsupportedError("layers must be of attention, got recurrent ones, which have no states yet")


def _read(config: Any, model: nn.Module, names: list[str], turns: list[Tensor]) -> tuple[Recording, int]:
    """Run a forward; returns the recording, and the shift of positions."""
    said = config.model_config
    text, longest = said.hf_text_config, longest_of(said.hf_text_config)
    num_tokens, shift = rows(min(longest, positions_of(model) or longest), bool(turns))
    generation = try_get_generation_config(said.model, said.trust_remote_code, said.revision)
    ids = token_ids(text.vocab_size, (said.hf_config, text, generation), num_tokens).int()
    positions = torch.arange(num_tokens)
    if shift:
        ids, positions = ids.repeat(2), torch.cat((positions, positions + shift))
    if said.uses_mrope:
        positions = positions.expand(3, -1)
    recording = Recording(len(ids) // num_tokens, num_tokens)
    metadata = dict.fromkeys(names, recording)
    with set_forward_context(metadata, config, num_tokens=len(ids), slot_mapping={}, skip_compiled=True):
        model(input_ids=ids, positions=positions)
    return recording, shift


def _gathered(recording: Recording, name: str, total: int) -> tuple[Tensor | None, Tensor | None]:
    """Keys ``[B, H, T, D]`` and mean squares of queries ``[Hq, D]`` of a layer, all heads of all ranks.

    ``total`` is the H of the model. If there are more ranks than heads, several ranks share a head.
    """
    key, power, ranks = recording.keys.get(name), recording.query_power(name), get_tp_group()
    if key is None or power is None or ranks.world_size == 1:
        return key, power
    shared = ranks.world_size // total if max(1, total // ranks.world_size) == key.shape[1] else 1
    return ranks.all_gather(key, 1)[:, :: max(1, shared)], ranks.all_gather(power, 0)


def _fitted(
    key: Tensor | None, power: Tensor | None, turns: list[Tensor], shift: int, still: bool
) -> LayerSmoothing:
    if key is None or power is None:
        return LayerSmoothing(None, "it keeps no keys")
    try:
        return fit(key, power, turns, shift, still)
    except Exception as error:  # only the first rank runs this, and the others wait for its result
        return LayerSmoothing(None, f"calibration failed: {summary_of(error)}")
