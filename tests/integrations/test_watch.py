"""``ModelWatch`` sees what a module consists of, and ``behavior_digest`` is the same for the same modules."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles.language_models import make_model
from torch import nn

from kvloom.integrations.transformers import enable
from kvloom.integrations.transformers.module_reader import behavior_digest
from kvloom.integrations.transformers.watch import ModelWatch

strength = 1.0


class Strength:
    """An object of somebody's."""

    def __init__(self) -> None:
        self.value = 1.0


class Opaque:
    """An object that shows nothing of itself."""

    __slots__ = ()


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
