"""The calls of mixers in a step of a session, which change the recurrent states of its requests.

The new tokens of a step are packed in one row, which a mixer would take for one text. So it is called for
some tokens of some requests at a time, with one row for each request. A step with one token for each request
needs one call.

Shapes: T new tokens of a step, B requests of a call, N new tokens of each.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.session.requests.cuts import Cuts
from kvloom.integrations.transformers.session.steps.mixer_calls import (
    Feed,
    MixerCall,
    calls_alike,
    calls_cut,
)
from kvloom.integrations.transformers.states.mixers import Inputs

_OF_STEP: Final = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "logits_indices",
    "logits_processor_args",
    "read_index",
    "write_index",
    "block_table",
    "is_causal",
)
"""Arguments by which transformers describes a whole step; they are wrong for a part of it."""


class MixerCalls:
    """The calls of mixers in one step.

    Args:
        layers: As in ``StateRows``.
        feeds: Tokens of the requests, in the order of the step.
        device: Device of the model.
        cuts: Where texts are cut; ``None`` if bits may depend on what else is in the step.

    Raises:
        StateError: the states of a request are not those after its stored tokens.
    """

    def __init__(
        self, layers: Sequence[Any], feeds: Sequence[Feed], device: torch.device, cuts: Cuts | None = None
    ) -> None:
        for feed in feeds:
            states = feed.held.states
            if (0 if states is None else states.num_tokens) != feed.past:
                raise StateError(
                    f"recurrent states must be those after {feed.past} tokens, got "
                    f"{0 if states is None else states.num_tokens}"
                )
        self._num_tokens = sum(feed.new for feed in feeds)
        self._calls = (
            calls_alike(layers, feeds, device) if cuts is None else calls_cut(layers, feeds, device, cuts)
        )
        self._order = torch.cat([call.index.flatten() for call in self._calls]).argsort()
        self._outputs = list[Any]()
        self._depth = 0  # number of nested mixers that run

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Call a mixer for all requests except those of the last call.

        Returns:
            Its arguments for the last call; ``None`` for a mixer within another one, whose arguments stay.

        Raises:
            StateError: the mixer is given other tokens than those of the step.
            UnsupportedError: an argument cannot be cut.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        inputs = Inputs.of(module, args, kwargs).without(_OF_STEP)
        if inputs.num_tokens != self._num_tokens:
            raise StateError(
                f"{inputs.name} must be given the {self._num_tokens} tokens of the step, got "
                f"{inputs.num_tokens}"
            )
        self._outputs = []
        *first, last = self._calls
        for call in first:
            call.cache.touched.clear()
            own, names = inputs.rows(call.index).given(call.cache)
            self._outputs.append(module(*own, **names))
            self._keep(call)
        last.cache.touched.clear()
        last.cache.recording = self  # so that ``after`` is called
        return inputs.rows(last.index).given(last.cache)

    def after(self, output: Any) -> Any:
        """The output for all tokens of the step, given that of the last call; ``None`` if it raised."""
        self._depth -= 1
        if self._depth:
            return None
        last = self._calls[-1]
        last.cache.recording = None
        if output is None:
            return None
        self._keep(last)
        return self._joined([*self._outputs, output])

    def _keep(self, call: MixerCall) -> None:
        for rows, copy in call.copies:
            call.cache.copy_rows(rows, call.cache.touched, copy)

    def _joined(self, outputs: Sequence[Any]) -> Any:
        kind = type(outputs[0])
        if kind is tuple:
            return tuple(map(self._joined, zip(*outputs, strict=True)))
        if outputs[0] is None:
            return None
        if not isinstance(outputs[0], Tensor):
            raise UnsupportedError(f"a mixer must return tensors [B, N, ...], got {kind.__name__}")
        return torch.cat([x.flatten(0, 1) for x in outputs]).index_select(0, self._order)[None]
