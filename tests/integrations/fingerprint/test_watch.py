"""``ModelWatch`` sees what a module consists of, and ``behavior_digest`` is the same for the same modules."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from oracles.language_models import make_model
from torch import nn

from kvloom.integrations.tensor_state import sample_on_devices
from kvloom.integrations.transformers import enable
from kvloom.integrations.transformers.fingerprint.module_reader import behavior_digest
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch

strength = 1.0


class Strength:
    """An object of somebody's."""

    def __init__(self) -> None:
        self.value = 1.0


class Opaque:
    """An object that shows nothing of itself."""

    __slots__ = ()


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Steering:
    """A hook that is an object."""

    factor = 1.0

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Steered output."""
        return self.steered(output)

    def steered(self, output: Any) -> Any:
        """Output by the attribute of the class."""
        return output * self.factor


class Doubled(nn.Linear):
    """A layer with more than a ``forward``."""

    factor = 2.0

    def forward(self, input: Any) -> Any:
        """As its parent, and then by a method."""
        return self.scaled(super().forward(input))

    def scaled(self, output: Any) -> Any:
        """Output by the attribute of the class."""
        return output * self.factor


def _twice(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.strength and super(type(self), self).forward(*args, **kwargs)


class Plain(nn.Linear):
    """A layer with the ``forward`` of its parent."""


tools: Any = types.ModuleType("tools")
tools.factor = 1.0


def by_module(module: nn.Module, args: Any, output: Any) -> Any:
    return output * tools.factor


def by_class(module: nn.Module, args: Any, output: Any) -> Any:
    return output * Steering.factor


def by_own_attribute(module: nn.Module, args: Any, output: Any, *, power: float = 1.0) -> Any:
    return output * by_own_attribute.factor**power  # type: ignore[attr-defined]


by_own_attribute.factor = 1.0  # type: ignore[attr-defined]


def by_global(module: nn.Module, args: Any, output: Any) -> Any:
    return output * strength


def by_argument(module: nn.Module, args: Any, output: Any, factor: Any = None) -> Any:
    return output * factor


def module() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.eval()
    first: Any = model[0]
    first.scales = {"a": [1.0, 2.0]}
    first.table = np.ones(3)
    first.strength = Strength()
    first.opaque = Opaque()
    first.tensors = [torch.ones(2)]
    first.names = {"a"}
    first.register_forward_hook(by_global)
    first.register_forward_hook(functools.partial(by_argument, factor=first.strength))
    first.register_buffer("outside", torch.ones(2), persistent=False)
    return model


def set_global(model: Any) -> None:
    globals()["strength"] += 1.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an item": lambda model: model[0].scales["a"].__setitem__(1, 3.0),
    "a longer list": lambda model: model[0].scales["a"].append(3.0),
    "another key": lambda model: model[0].scales.update(b=[]),
    "a set": lambda model: model[0].names.add("b"),
    "an array": lambda model: setattr(model[0], "table", np.zeros(3)),
    "an attribute of an object": lambda model: setattr(model[0].strength, "value", 2.0),
    "an object": lambda model: setattr(model[0], "opaque", Opaque()),
    "a tensor in a list": lambda model: model[0].tensors[0].add_(1),
    "a new attribute": lambda model: setattr(model[0], "new", 1),
    "an attribute for another": lambda model: (delattr(model[0], "names"), setattr(model[0], "other", 1)),
    "a global": set_global,
    "a hook for another": lambda model: (
        model[0]._forward_hooks.popitem(),
        model[0].register_forward_hook(by_global),
    ),
    "a buffer": lambda model: model[0].outside.mul_(2),
    "training": lambda model: model[1].train(),
    "a child": lambda model: setattr(model, "1", nn.Linear(4, 4)),
    "a larger model": lambda model: model.append(nn.Linear(4, 4)),
    "dtype": lambda model: model.half(),
    "data": lambda model: setattr(model[1].weight, "data", model[1].weight.data.clone()),
    "a forward": lambda model: setattr(model[1], "forward", lambda x: x),
}


def classes() -> Any:
    """A model in which classes, functions and objects of somebody's decide results."""
    model = nn.Sequential(Doubled(4, 4), Plain(4, 4))
    model.eval()
    first: Any = model[0]
    first.slotted, first.table = Slotted(), np.ones(3)
    for hook in (Steering(), by_module, by_class, by_own_attribute):
        first.register_forward_hook(hook)
    return model


OF_CLASSES: dict[str, tuple[Any, str, Any]] = {
    "an attribute of a class": (Doubled, "factor", 3.0),
    "a method of a class": (Doubled, "scaled", lambda self, output: output),
    "the parent's forward": (nn.Linear, "forward", lambda self, input: input),
    "an attribute of a hook's class": (Steering, "factor", 3.0),
    "a method of a hook": (Steering, "steered", lambda self, output: output),
    "a global of a module": (tools, "factor", 3.0),
    "an attribute of a function": (by_own_attribute, "factor", 3.0),
    "keywords of a function": (by_own_attribute, "__kwdefaults__", {"power": 2.0}),
}


@pytest.mark.parametrize("name", list(OF_CLASSES))
def test_a_change_of_a_class_or_function_has_another_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = classes()
    watch, digest = ModelWatch(model), behavior_digest(model)
    with monkeypatch.context() as patch:
        patch.setattr(*OF_CLASSES[name])
        assert watch.state() != ""
        assert behavior_digest(model) != digest
    assert watch.state() == ""
    assert behavior_digest(model) == digest


def test_a_forward_put_into_a_class_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ModelWatch(classes())
    monkeypatch.setattr(Plain, "forward", lambda self, input: input, raising=False)
    assert watch.state() != ""


def test_what_is_written_into_slots_and_arrays_is_seen() -> None:
    model = classes()
    watch, digests = ModelWatch(model), {behavior_digest(model)}
    model[0].slotted.value = 2.0
    names = [watch.state()]
    digests.add(behavior_digest(model))
    model[0].table[1] = 3.0
    names.append(watch.state())
    digests.add(behavior_digest(model))
    assert len({"", *names}) == len(digests) == 3


def test_a_weight_of_a_hook_is_part_of_its_behavior() -> None:
    digests = set()
    for factor in (1.0, 2.0, 1.0):
        torch.manual_seed(0)
        model, coder = nn.Linear(4, 4), nn.Linear(4, 4)
        coder.weight.data.mul_(factor)
        model.register_forward_hook(lambda module, args, output, coder=coder: coder(output))
        digests.add(behavior_digest(model))
    assert len(digests) == 2


def test_a_hook_that_is_given_names_is_another() -> None:
    model = nn.Linear(4, 4)

    def hook(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        return None if kwargs is None else (args, {})

    handle = model.register_forward_pre_hook(hook)
    watch, digest = ModelWatch(model), behavior_digest(model)
    handle.remove()
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    assert watch.state() != "" and behavior_digest(model) != digest
    handle.remove()
    model.register_forward_pre_hook(hook)
    assert watch.state() == "" and behavior_digest(model) == digest


def test_what_a_hook_reads_in_a_queue_is_seen() -> None:
    model, strengths = nn.Linear(4, 4), collections.deque([1.0])
    model.register_forward_hook(lambda module, args, output: output * strengths[0])
    watch = ModelWatch(model)
    strengths[0] = 2.0
    assert watch.quick_state() != ""


def test_a_hook_of_all_modules_has_another_name() -> None:
    watch = ModelWatch(nn.Linear(4, 4))
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        assert watch.state() != ""
    finally:
        handle.remove()
    assert watch.state() == ""


@pytest.mark.parametrize("change", ["hook", "attribute", "class"])
def test_what_a_model_and_its_child_both_have_is_seen_in_each(change: str) -> None:
    """The child of most models is called ``model``, as the model itself is in messages."""
    model: Any = make_model()
    watched: list[nn.Module] = [model, model.model]

    def make(part: Any, strength: float) -> None:
        if change == "hook":
            part.register_forward_pre_hook(functools.partial(print, strength))
        elif change == "attribute":
            part.strength = strength
        else:
            part.__class__ = type("Own", (type(part),), {"strength": strength, "forward": _twice})

    for part in watched:
        make(part, 1.0)
    watch, digests = ModelWatch(model), {behavior_digest(model)}
    before = watch.state()
    for part in watched:
        make(part, 2.0)
        assert watch.state() != before
        before = watch.state()
        digests.add(behavior_digest(model))
    assert len(digests) == 3


def test_another_function_of_torch_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ModelWatch(nn.Linear(4, 4))
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", lambda query, key, value: value)
        assert watch.state() != ""
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "silu", nn.functional.gelu)
        assert watch.state() != ""
    assert watch.state() == ""


@pytest.mark.parametrize("name", ["rsqrt", "cat", "Tensor.cos", "Tensor.pow"])
def test_another_function_that_a_model_calls_has_another_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of one of torch's, or of a method of its tensors that they have from their parent."""
    model = make_model()
    watch, digest = ModelWatch(model), behavior_digest(model)
    *space, called = name.split(".")
    with monkeypatch.context() as patch:
        owner = torch.Tensor if space else torch
        before = getattr(owner, called)
        patch.setattr(owner, called, lambda *args, **kwargs: before(*args, **kwargs) * 2)
        assert watch.quick_state() == watch.state() != ""
        assert behavior_digest(model) != digest
    assert watch.state() == ""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cholesky", lambda x: x)  # which it does not call
        assert watch.state() == ""


def test_a_pruned_model_leaves_its_name() -> None:
    model = nn.Linear(4, 4)
    nn.utils.prune.l1_unstructured(model, "weight", 0.5)
    watch = ModelWatch(model)
    model(torch.ones(1, 4))
    assert watch.state() == ""
    model.weight_mask.mul_(0)
    assert watch.state() != ""


def test_a_hook_that_logs_leaves_the_name() -> None:
    model, log = nn.Linear(4, 4), logging.getLogger("somebody")

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        log.debug("a step")

    model.register_forward_hook(hook)
    watch = ModelWatch(model)
    model(torch.ones(1, 4))
    assert watch.state() == ""


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_has_another_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = module()
    watch = ModelWatch(model)
    assert [watch.state(), watch.quick_state()] == ["", ""]
    with caplog.at_level(logging.INFO, "kvloom"):
        CHANGES[name](model)
        changed = watch.state()
    assert changed
    assert [watch.state(), watch.quick_state()] == [changed, changed]
    (line,) = caplog.messages
    assert line.startswith("Sequential changed, and what it computes from now on is kept apart: ")


def test_what_is_undone_has_its_name_again() -> None:
    model = module()
    watch = ModelWatch(model)
    model[0].scales["a"][0] = 5.0
    first = watch.state()
    model[0].scales["a"][0] = 1.0
    assert watch.state() == ""
    model[0].scales["a"][0] = 5.0
    assert watch.state() == first != ""


def test_weights_that_were_written_back_have_another_name() -> None:
    model = module()
    watch, names = ModelWatch(model), []
    for _ in range(3):
        with torch.no_grad():
            model[1].weight.add_(1).sub_(1)
        names.append(watch.state())
    assert len({"", *names}) == 4


def test_tensors_of_inference_mode_are_watched() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
        watch = ModelWatch(model)
        assert watch.state() == ""
        model.weight.add_(1)
        assert watch.state() != ""


def test_what_cannot_be_read_is_no_error() -> None:
    model = module()
    model[0].lock = threading.Lock()
    model[0].itself = [model]
    model[0].itself.append(model[0].itself)
    model[0].words = {str(i): i for i in range(10_000)}
    model[0].shapes = nn.Linear(2, 2, device="meta")
    watch = ModelWatch(model)
    assert watch.state() == ""
    model[0].words["more"] = 1
    assert watch.state() != ""


def test_using_a_model_leaves_its_name() -> None:
    model = make_model()
    watch = ModelWatch(model)
    ids = torch.tensor([[5, 6, 7]])
    model.generate(ids, max_new_tokens=4, do_sample=False)
    model.generate(ids, max_new_tokens=4, num_beams=2, do_sample=False)
    model(ids, output_hidden_states=True, output_attentions=False)
    enable(model, kv="int8:g16")
    model.generate(ids, max_new_tokens=4, do_sample=False)
    model.set_attn_implementation("eager")
    model(ids, output_attentions=True)
    model.state_dict()
    assert watch.state() == ""
    model.config.rms_norm_eps = 0.5
    assert watch.state() != ""


def test_behavior_is_the_same_for_the_same_modules() -> None:
    model = make_model()
    digests = {behavior_digest(x) for x in (model, make_model(), copy.deepcopy(model), make_model().half())}
    with torch.device("meta"):
        digests.add(behavior_digest(type(model)(model.config)))
    assert len(digests) == 1
    model.model.layers[0].self_attn.scaling = 0.5
    assert behavior_digest(model) not in digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_sample_of_a_device_is_spread_over_each_tensor(dtype: torch.dtype) -> None:
    tensors = [torch.zeros(0, dtype=dtype), torch.zeros(7, dtype=dtype), torch.zeros(64, 65, dtype=dtype)]
    before = sample_on_devices(tensors)
    for tensor, part in ((tensors[1], slice(0, 1)), (tensors[2], slice(0, 2)), (tensors[2], slice(62, 64))):
        tensor[part] = 1
        assert sample_on_devices(tensors) != before
        tensor[part] = 0
    assert sample_on_devices(tensors) == before


def test_an_unchanged_model_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = make_model(), []
    read = ModelWatch._read
    monkeypatch.setattr(ModelWatch, "_read", lambda watch: (reads.append(watch), read(watch)))
    watch = ModelWatch(model)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):  # a setting of torch is no reason to read a model
            assert watch.state() == watch.quick_state() != ""
        assert watch.state() == watch.quick_state() == ""
    assert len(reads) == 1
