"""A trial whether mixers give a row of one token the same bits in calls of any number of rows.

Tokens of requests with drafts are computed one after the other, each with those of other requests.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.integrations.transformers.cache.trial import states_of_text
from kvloom.integrations.transformers.invariance import Wish, hold_layers, release_layers
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.session.requests.groups import stateful_layers_of
from kvloom.integrations.transformers.session.requests.state_rows import StateRows
from kvloom.integrations.transformers.states.mixers import Inputs, is_mixer

_FIRST: Final = 12
"""Number of tokens behind which mixers are tried."""
_ROWS: Final = (2, 3, 5, 8, 17)
"""Numbers of rows with which they are tried."""
_HOLDER: Final = "trial of rows"


def why_rows_differ(model: Any) -> str:
    """Why tokens of several requests may have other bits than one in a mixer; empty if they have its bits.

    Args:
        model: A model with recurrent states, whose layers are made batch invariant for the trial.
    """
    if any(x.device.type == "meta" for x in model.parameters()):
        return ""
    hold_layers(model, _HOLDER, Wish(batch_invariant=True, pack=False))
    try:
        with undisturbed(model):
            for module, inputs in _calls(model):
                for count in _ROWS:
                    if not _is_alike(model, module, inputs, count):
                        return f"a token in {inputs.name} has other bits among those of {count} requests"
    finally:
        release_layers(model, _HOLDER)
    return ""


def _calls(model: Any) -> list[tuple[nn.Module, Inputs]]:
    """Each mixer with its arguments for a text of one row."""
    calls, depth = list[tuple[nn.Module, Inputs]](), [0]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        depth[0] += 1
        if depth[0] == 1:
            calls.append((module, Inputs.of(module, args, kwargs).copied()))

    def after(_module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        depth[0] -= 1

    hooks = list[Any]()
    for module in model.modules():
        kind: Any = type(module)
        if is_mixer(kind):
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        states_of_text(model, _FIRST + max(_ROWS))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _is_alike(model: Any, module: nn.Module, inputs: Inputs, count: int) -> bool:
    """Whether a mixer computes the next token of ``count`` requests at once as for each alone."""
    past = StateRows(stateful_layers_of(model) or ())
    _call(module, inputs, torch.arange(_FIRST)[None], past)
    together, index = StateRows(past.layers), torch.arange(_FIRST, _FIRST + count)[:, None]
    past.copy_rows([0] * count, past.touched, together)
    found = _call(module, inputs, index, together)
    for row in range(count):
        one = StateRows(past.layers)
        past.copy_rows([0], past.touched, one)
        if not torch.equal(_call(module, inputs, index[row : row + 1], one), found[row : row + 1]):
            return False
        states = together.tensors()
        if any(not torch.equal(x[0], states[key][row]) for key, x in one.tensors().items()):
            return False
    return True


def _call(module: nn.Module, inputs: Inputs, index: Tensor, cache: StateRows) -> Tensor:
    """The first result of a mixer for some tokens."""
    args, kwargs = inputs.rows(index.to(inputs.device)).given(cache)
    result = module(*args, **kwargs)
    first: Tensor = result[0] if isinstance(result, tuple) else result
    return first
