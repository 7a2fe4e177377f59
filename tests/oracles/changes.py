"""Changes of a model that change its keys and values, and what undoes them."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft import LoraConfig
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations import peft as transformers_peft
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from oracles.language_models import make_model

# transformers 5.24 asks for peft 0.22, which was published later; what is used here is in those before, too.
transformers_peft.MIN_PEFT_VERSION = "0.17"


def _lora() -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(r=4, init_lora_weights=False, target_modules=targets, task_type="CAUSAL_LM")


def adapted_model() -> Any:
    """A Llama with two adapters, of which the first is active, by transformers' own methods."""
    model = make_model()
    for name, seed in (("one", 1), ("two", 2)):
        torch.manual_seed(seed)
        with warnings.catch_warnings():  # peft warns of a second adapter
            warnings.simplefilter("ignore")
            model.add_adapter(_lora(), name)
    model.set_adapter("one")
    return model.eval()


def peft_model() -> Any:
    """A Llama in a ``PeftModel`` with one adapter."""
    torch.manual_seed(1)
    with warnings.catch_warnings():  # peft calls what transformers deprecated
        warnings.simplefilter("ignore")
        return peft.get_peft_model(make_model(), _lora()).eval()


def _attention(model: Any) -> Any:
    return model.get_decoder().layers[1].self_attn


@contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def scaled_attribute(model: Any) -> Iterator[None]:
    """The scaling of one layer's scores."""
    with put(_attention(model), "scaling", _attention(model).scaling * 3):
        yield


@contextmanager
def epsilon(model: Any) -> Iterator[None]:
    """The epsilon of a norm."""
    with put(model.get_decoder().layers[0].input_layernorm, "variance_epsilon", 1.0):
        yield


@contextmanager
def activation(model: Any) -> Iterator[None]:
    """Another module in the place of an activation."""
    with put(model.get_decoder().layers[0].mlp, "act_fn", torch.nn.Tanh()):
        yield


@contextmanager
def rope_scaling(model: Any) -> Iterator[None]:
    """What cosines and sines are multiplied by."""
    with put(model.get_decoder().rotary_emb, "attention_scaling", 0.5):
        yield


@contextmanager
def hook(model: Any) -> Iterator[None]:
    """A hook that steers what a layer returns."""
    handle = model.get_decoder().layers[0].register_forward_hook(lambda module, args, out: out + 1)
    yield
    handle.remove()


@contextmanager
def hook_of_another_strength(model: Any) -> Iterator[None]:
    """A hook that stays, and whose vector is written."""
    vector = torch.zeros(64)
    model.get_decoder().layers[0].register_forward_hook(lambda module, args, out: out + vector)
    vector += 1
    yield


@contextmanager
def forward_of_an_instance(model: Any) -> Iterator[None]:
    """A ``forward`` that was put into one module."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    norm = model.get_decoder().layers[1].input_layernorm
    norm.forward = types.MethodType(forward, norm)
    yield
    del norm.forward


@contextmanager
def forward_of_a_class(model: Any) -> Iterator[None]:
    """A ``forward`` that was put into a class of transformers."""
    theirs = LlamaAttention.forward

    @functools.wraps(theirs)  # so that it says to be theirs
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = theirs(self, *args, **kwargs)
        return out * 0.5, weights

    with put(LlamaAttention, "forward", forward):
        yield


@contextmanager
def buffer_outside_the_state_dict(model: Any) -> Iterator[None]:
    """The frequencies of RoPE, written."""
    model.get_decoder().rotary_emb.inv_freq.mul_(0.5)
    yield


@contextmanager
def weights_in_place(model: Any) -> Iterator[None]:
    """An optimizer's step."""
    with torch.no_grad():
        _attention(model).v_proj.weight.add_(0.05)
    yield


@contextmanager
def weights_by_data(model: Any) -> Iterator[None]:
    """What torch counts no version of."""
    model.get_decoder().layers[0].mlp.down_proj.weight.data.mul_(1.5)
    yield


@contextmanager
def fused_optimizer(model: Any) -> Iterator[None]:
    """A fused step, which counts no version either."""
    weights = [_attention(model).v_proj.weight]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(weights, lr=0.05, fused=True).step()
    yield


@contextmanager
def state_dict(model: Any) -> Iterator[None]:
    """Other weights, loaded."""
    other = make_model()
    torch.manual_seed(3)
    for weight in other.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    model.load_state_dict(other.state_dict())
    yield


@contextmanager
def part_of_a_weight_by_data(model: Any) -> Iterator[None]:
    """Some heads that are turned around, which torch counts no version of."""
    model.get_decoder().layers[0].self_attn.o_proj.weight.data[:, :48] *= -2
    yield


def _near(
    module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention to the last 12 tokens, which are all tokens of a short text."""
    columns = torch.arange(key.shape[2])
    rows = columns[key.shape[2] - query.shape[2] :, None]
    seen = (columns <= rows) & (columns > rows - 12)
    key, value = (modeling_llama.repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


def set_near_attention(model: Any, name: str) -> None:
    """Register an attention under a name, and let a model use it."""
    AttentionInterface.register(name, _near)
    model.set_attn_implementation(name)


@contextmanager
def attention_named_like_a_library(model: Any) -> Iterator[None]:
    """Another attention, whose name begins as that of a library's does."""
    before = model.config._attn_implementation
    set_near_attention(model, "sdpa_near")
    yield
    model.set_attn_implementation(before)


@contextmanager
def attention_in_the_place_of_another(model: Any) -> Iterator[None]:
    """Another attention under the name of a library's."""
    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", _near)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", theirs)


@contextmanager
def function_of_a_library(model: Any) -> Iterator[None]:
    """Another function in the place of one that a library's functions call."""
    with put(modeling_llama, "rotate_half", lambda x: x):
        yield


@contextmanager
def another_parameter(model: Any) -> Iterator[None]:
    """A parameter in the place of another."""
    v_proj = _attention(model).v_proj
    v_proj.weight = torch.nn.Parameter(v_proj.weight.detach() * 0.5)
    yield


CHANGES: dict[str, Callable[[Any], Any]] = {
    x.__name__: x
    for x in (
        scaled_attribute,
        epsilon,
        activation,
        rope_scaling,
        hook,
        forward_of_an_instance,
        forward_of_a_class,
        attention_named_like_a_library,
        attention_in_the_place_of_another,
        function_of_a_library,
        hook_of_another_strength,
        buffer_outside_the_state_dict,
        weights_in_place,
        weights_by_data,
        part_of_a_weight_by_data,
        fused_optimizer,
        state_dict,
        another_parameter,
    )
}
UNDONE = [*CHANGES][:10]
"""Those after which the model is what it was."""
ATTENTIONS = ("attention_named_like_a_library", "attention_in_the_place_of_another")
"""Those that change nothing in a session, which has an attention of its own."""


@contextmanager
def switched(model: Any) -> Iterator[None]:
    """The other adapter."""
    model.set_adapter("two")
    yield
    model.set_adapter("one")


@contextmanager
def disabled(model: Any) -> Iterator[None]:
    """No adapter."""
    model.disable_adapters()
    yield
    model.enable_adapters()


@contextmanager
def rescaled(model: Any) -> Iterator[None]:
    """The adapter at another strength."""
    layers = [x for x in model.modules() if isinstance(x, peft.tuners.lora.LoraLayer)]
    for layer in layers:
        layer.scaling["one"] *= 3
    yield
    for layer in layers:
        layer.scaling["one"] /= 3


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """The adapter at another strength, written into the weights."""
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.scaling["one"] *= 3
            layer.merge()
    yield


ADAPTERS: dict[str, Callable[[Any], Any]] = {x.__name__: x for x in (switched, disabled, rescaled, merged)}


class HalvedLlama(LlamaForCausalLM):
    """A subclass with another ``forward``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """With hidden states of another size behind the first layer."""
        layer = self.model.layers[0]
        handle = layer.register_forward_hook(lambda module, inputs, out: out * 0.5)
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


class ScaledLlama(LlamaForCausalLM):
    """A subclass that changes a layer within its ``forward``, as a ``PeftModel`` does for some adapters."""

    factor = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """With another epsilon of a norm."""
        norm = self.model.layers[0].input_layernorm
        before, norm.variance_epsilon = norm.variance_epsilon, self.factor
        try:
            return super().forward(*args, **kwargs)
        finally:
            norm.variance_epsilon = before
