"""Trials of a model with texts of ours, of which nothing is left in it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from kvloom.integrations.transformers.models.remembered import memories_of
from kvloom.integrations.transformers.models.rope import has_dynamic_rope


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode, without gradients, and remembers no text.

    At the end each module has its mode, the model remembers what it did, and RoPE whose frequencies depend on
    the longest text so far has those of before.
    """
    ropes = [
        (module, dict(vars(module)), dict(module._buffers))
        for module in model.modules()
        if has_dynamic_rope(module)
    ]
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for memory in memories_of(model):
                stack.enter_context(memory.resting())
            yield
    finally:
        for module in was_training:
            module.training = True
        for module, own, buffers in ropes:
            vars(module).update(own)
            module._buffers.update(buffers)
