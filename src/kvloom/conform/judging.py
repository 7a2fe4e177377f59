"""Expected results of a legal call, by name, from the oracles; the call does not change."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvloom.conform.describe import Call, Results
from kvloom.conform.oracles import ascend, attending, caches, paged, pmx, recurrent


def copied(call: Call) -> Call:
    """``call`` with its tensors cloned, contiguous."""
    return {name: _copied(x) for name, x in call.items() if x is not None}


def _copied(x: Any) -> Any:
    if isinstance(x, list):
        return [_copied(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    return x.clone().contiguous()


def in_place(function: Callable[..., object], *updated: str) -> Callable[[Call], Results]:
    """Oracle of an operator that updates arguments and returns nothing."""

    def judge(call: Call) -> Results:
        mine = copied(call)
        function(**mine)
        return named({name: mine[name] for name in updated if name in mine})

    return judge


def returning(function: Callable[..., Results]) -> Callable[[Call], Results]:
    """Oracle of an operator that returns its results."""
    return lambda call: function(**copied(call))


def named(results: dict[str, Any]) -> Results:
    """``results`` with lists flattened: ``keys.0``, ``keys.1`` and so on."""
    found: Results = {}
    for name, x in results.items():
        if isinstance(x, list):
            found |= {f"{name}.{i}": each for i, each in enumerate(x)}
        else:
            found[name] = x
    return found


def stored(call: Call) -> Results:
    """``KeyValueCache``, static."""
    return _some(pmx.key_value_cache(**copied(call))._asdict())


def stored_dynamic(call: Call) -> Results:
    """``dynamic_batching.KeyValueCache``."""
    return _some(pmx.dynamic_key_value_cache(**copied(call))._asdict())


def attended(spec: str) -> Callable[[Call], Results]:
    """``dynamic_batching.MultiHeadCacheAttention`` of the document ``spec``."""

    def judge(call: Call) -> Results:
        mine = copied(call)
        mine["is_causal"] = bool(mine["is_causal"])
        found = pmx.multi_head_cache_attention(**mine, spec=spec)
        return _some({"attn_output": found.output, "cache": found.cache, "scale": found.scale})

    return judge


def _some(results: dict[str, Tensor | None]) -> Results:
    return {name: x for name, x in results.items() if x is not None}


def scattered(call: Call) -> Results:
    """ScatterPaKvCache; tensors are not copied, since Nct reads memory outside them."""
    mine: Call = {"value": None, "value_cache": None, **call}
    written: Results = {
        name: mine[name].clone() for name in ("key_cache", "value_cache") if mine[name] is not None
    }
    ascend.scatter_pa_kv_cache(**(mine | written))
    return written


gathered = in_place(ascend.gather_pa_kv_cache, "key", "value")
reshaped = in_place(paged.reshape_and_cache, "key_cache", "value_cache")
reshaped_flash = in_place(paged.reshape_and_cache_flash, "key_cache", "value_cache")
blocks_copied = in_place(paged.copy_blocks, "key_caches", "value_caches")
appended = in_place(paged.append_paged_kv_cache, "paged_kv_cache")
paged_written = in_place(paged.paged_attention_write, "key_cache", "value_cache")
onnx_attended = returning(attending.onnx_attention)
group_attended = returning(attending.group_query_attention)
updated = returning(caches.cache_update)
attended_linearly = returning(recurrent.linear_attention)
convolved = returning(recurrent.causal_conv_with_state)


def tensor_scattered(call: Call) -> Results:
    """``TensorScatter``."""
    return {"present_cache": paged.tensor_scatter(**{"write_indices": None, **copied(call)})}
