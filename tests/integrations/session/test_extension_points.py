"""What of transformers' continuous batching this library stands on.

A test that fails here says which name of a new transformers is gone or differs, and who needs it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import pytest
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    ContinuousBatchingConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import (
    cb_logits_processors,
    continuous_api,
    input_outputs,
    model_runner,
    offloading_manager,
    requests,
    scheduler,
)

from kvloom.integrations.transformers.session.cache import BatchCache
from kvloom.integrations.transformers.session.manager import BatchingManager
from kvloom.integrations.transformers.session.scheduler import SharingScheduler

PACKAGE = "transformers.generation.continuous_batching"
READERS = ("scheduler", "input_outputs", "offloading_manager", "model_runner", "continuous_api")
# Read only where the manager's own cache is made, graphs are captured or requests are offloaded: all refused.
UNREACHED = {"num_blocks", "fill_block_table", "_copy_view", "bytes_per_block"}


def names_of(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def expect(found: object, wanted: object, what: str) -> None:
    assert found == wanted, f"{what}: this library needs {wanted}, this transformers has {found}"


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_attention_and_masks_are_registered_by_name(interface: Any) -> None:
    expect(names_of(interface.register), ["key", "value"], f"{interface.__name__}.register")


def test_a_session_begins_on_the_model() -> None:
    wanted = ["self", "generation_config", "continuous_batching_config", "workload_hints"]
    expect(names_of(LlamaForCausalLM.init_continuous_batching), wanted, "init_continuous_batching")
    for caller in ("generate_batch", "continuous_batching_context_manager"):
        source = inspect.getsource(getattr(LlamaForCausalLM, caller))
        reads = {"self.init_continuous_batching(", "self.continuous_batching_context_manager("}
        assert any(x in source for x in reads), f"{caller} no longer asks the model for its manager"
    assert hasattr(LlamaForCausalLM, "destroy_cached_continuous_batching_manager")
    assert hasattr(LlamaForCausalLM, "_can_set_attn_implementation")


def test_the_manager_has_what_is_overridden() -> None:
    theirs = continuous_api.ContinuousBatchingManager
    wanted = {
        "__init__": ["self", "model", "generation_config", "continuous_batching_config", "workload_hints"],
        "switch_to_cb_friendly_attn": ["self", "model", "auto_switch_to_flash"],
        "_create_batch_processor": ["self"],
        "join": ["self", "stop_trigger_time", "timeout"],
        "_generation_step": ["self"],
    }
    for name, parameters in wanted.items():
        expect(names_of(getattr(theirs, name)), parameters, f"ContinuousBatchingManager.{name}")
    parameters = names_of(theirs.add_request)
    assert "input_ids" in parameters and "logit_processor_kwargs" in parameters, "add_request takes no salt"
    for name in ("self._original_attn_impl", "self._wake_up_loop", "self._use_prefix_sharing"):
        assert name in inspect.getsource(theirs), f"ContinuousBatchingManager has no {name}"
    assert issubclass(BatchingManager, theirs)


def test_the_processor_takes_what_the_manager_gives() -> None:
    wanted = {
        *("cache", "config", "generation_config", "continuous_batching_config", "logit_processor"),
        *("input_queue", "cancel_queue", "output_router", "background_thread_status", "model_device"),
        *("model_dtype", "scheduler", "distributed_helper"),
    }
    theirs = continuous_api.ContinuousBatchProcessor
    expect({*names_of(theirs)}, wanted, "ContinuousBatchProcessor")
    expect(names_of(theirs._handle_request_error), ["self", "error", "state"], "_handle_request_error")


def test_tokens_can_be_chosen_from_logits_that_a_step_kept() -> None:
    """What ``steps/drafted.py`` needs to choose more than one token of a request after one forward."""
    theirs = model_runner.ModelRunner._forward_process_and_sample
    wanted = ["self", "model", "batch_data", "carry_over_ids", "prev_output_ids", "output_ids"]
    expect(names_of(theirs), wanted, "_forward_process_and_sample")
    read = {
        node.slice.value
        for node in ast.walk(ast.parse(inspect.getsource(theirs).strip()))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    }
    expect(read - {0}, {"input_ids", "logits_indices", "logits_processor_args"}, "what it reads of a batch")
    source = inspect.getsource(input_outputs.ContinuousBatchingIOs)
    for name in ("self._bulk_input_tensor", "static_inputs", "self.num_request_in_batch", "get_cb_kwargs"):
        assert name in source, f"ContinuousBatchingIOs has no {name}"
    for name in ("prepare_next_batch", "_generation_step", "update_batch"):
        expect(
            names_of(getattr(continuous_api.ContinuousBatchProcessor, name)),
            ["self", "model"] if name == "_generation_step" else ["self"],
            name,
        )


def test_schedulers_have_what_is_overridden() -> None:
    wanted = {
        "__init__": ["self", "cache", "safety_margin", "max_requests_per_batch"],
        "schedule_batch": ["self", "token_budget", "cache_budget"],
        "add_waiting_request": ["self", "state"],
        "finish_request": ["self", "request_id"],
        "_infer_request_tokens": ["self", "state", "request_ids_to_remove_from_waiting"],
        "_cleanup_waiting_queue": ["self", "request_ids_to_remove_from_waiting"],
        "_get_waiting_candidates": ["self"],
    }
    for name in ("fifo", "prefill_first"):
        theirs = scheduler.SCHEDULER_MAPPING[name]
        for method, parameters in wanted.items():
            expect(names_of(getattr(theirs, method)), parameters, f"{theirs.__name__}.{method}")
        assert issubclass(theirs, SharingScheduler.__mro__[1])


def test_requests_have_what_is_read() -> None:
    fields = {
        *("request_id", "initial_tokens", "generated_tokens", "max_new_tokens", "_new_tokens_limit"),
        *("num_children", "logit_processor_kwargs"),
    }
    missing = fields - {*requests.RequestState.__dataclass_fields__}
    assert not missing, f"RequestState has no {missing}"
    state = requests.RequestState("a", [1, 2], logit_processor_kwargs={"cache_salt": "b"})
    for other in (state.fork("c"), state.create_equivalent_initial_request()):
        assert other.logit_processor_kwargs == {"cache_salt": "b"}, "a salt is lost with a fork or preemption"
    processors = cb_logits_processors.ContinuousBatchingLogitsProcessorList([])
    processors.supported_keys["cache_salt"] = str
    processors.check_kwargs({"cache_salt": "b"})


def test_a_step_says_which_requests_it_feeds_and_which_get_a_token() -> None:
    missing = {"state", "query_length", "has_new_token"} - {*requests.FutureRequestState.__slots__}
    assert not missing, f"FutureRequestState has no {missing}"
    assert "position_offset" in requests.RequestState.__dataclass_fields__
    wanted = ["self", "requests_in_batch", "arg_storage"]
    theirs = cb_logits_processors.ContinuousBatchingLogitsProcessorList
    expect(names_of(theirs.prepare_tensor_args), wanted, "prepare_tensor_args")
    source = inspect.getsource(input_outputs.ContinuousBatchingIOs)
    for name in ("self.requests_in_batch", "logits_indices="):
        assert name in source, f"ContinuousBatchingIOs has no {name}"
    assert '"logits_to_keep"' in inspect.getsource(model_runner.ModelRunner)


def test_the_configuration_has_what_is_read() -> None:
    wanted = {
        *("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"),
        *(
            "max_memory_percent",
            "scheduler_type",
            "safety_margin",
            "allow_block_sharing",
            "cpu_offload_space",
        ),
        *("use_cuda_graph", "use_async_batching", "q_padding_interval_size", "kv_padding_interval_size"),
        *("varlen_compile_config", "decode_compile_config", "default_compile_level"),
    }
    missing = wanted - {*ContinuousBatchingConfig.__dataclass_fields__}
    assert not missing, f"ContinuousBatchingConfig has no {missing}"


def test_preemption_says_so() -> None:
    source = inspect.getsource(offloading_manager.OffloadingManager.offload_requests)
    assert "no_cache=True" in source, "a preempted request is no longer told from one that has ended"


@pytest.mark.parametrize("module", READERS)
def test_the_cache_has_every_name_that_is_read_of_it(module: str) -> None:
    """Of ``cache`` and of its allocators, wherever continuous batching reads them."""
    source = inspect.getsource(importlib.import_module(f"{PACKAGE}.{module}"))
    known = {*dir(BatchCache), *instance_names(BatchCache)}
    missing = names_read(source) - known - UNREACHED
    assert not missing, f"{module} of this transformers reads {sorted(missing)} of a cache"


def instance_names(cls: type) -> set[str]:
    tree = ast.parse(inspect.getsource(cls))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def names_read(source: str) -> set[str]:
    """Attributes read of names such as ``cache``, ``self.cache``, ``allocator`` and ``ca``."""
    owners = {"cache", "allocator", "ca", "cache_allocator", "paged_attention_cache"}
    read = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = (
                owner.id
                if isinstance(owner, ast.Name)
                else owner.attr
                if isinstance(owner, ast.Attribute)
                else ""
            )
            if name in owners:
                read.add(node.attr)
    return read
