"""The requests of a step, and the metadata made of them when its forward begins."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from kvloom.caches.prefixes.step import Step
from kvloom.integrations.transformers.session.groups import SessionGroup
from kvloom.integrations.transformers.session.held import Held
from kvloom.integrations.transformers.session.recurrent import Feed, MixerCalls


class Begun(NamedTuple):
    """A step whose forward has begun.

    Attributes:
        step: Attention metadata of the step.
        calls: Calls of mixers; ``None`` for a model without recurrent states.
    """

    step: Step
    calls: MixerCalls | None


class StepPlan:
    """The requests that the next step feeds.

    Args:
        groups: Groups of layers.
        stateful: Layers of any cache for a model with recurrent states; ``None`` for other models.
        device: Device of the model.

    Attributes:
        num_steps: Number of steps that have begun.
        num_tokens: Number of tokens in them.
    """

    def __init__(
        self, groups: Sequence[SessionGroup], stateful: Sequence[Any] | None, device: torch.device
    ) -> None:
        self._groups, self._stateful, self._device = groups, stateful, device
        self.num_steps = self.num_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Remove all requests."""
        self._feeds: list[tuple[str, int, int]] = []
        self._begun: Begun | None = None

    def add(self, request_id: str, past: int, new: int) -> None:
        """Add a request with ``new`` tokens after ``past`` stored ones; begins a new step if needed."""
        if self._begun is not None:
            self.clear()
        self._feeds.append((request_id, past, new))

    def begin(self, held: Mapping[str, Held], lock: AbstractContextManager[Any]) -> Begun:
        """The step, made at the first call.

        Args:
            held: ``Held`` of each request.
            lock: Lock of ``held``, taken while the step is made.

        Raises:
            StateError: as ``MixerCalls``.
        """
        if self._begun is None:
            with lock:
                self._begun = self._made(held)
        return self._begun

    def _made(self, held: Mapping[str, Held]) -> Begun:
        feeds = [Feed(held[name], past, new) for name, past, new in self._feeds]
        lengths = [(x.past, x.new) for x in feeds]
        step = Step(lengths, self._groups, [*zip(*(x.held.groups for x in feeds), strict=True)])
        calls = None if self._stateful is None else MixerCalls(self._stateful, feeds, self._device)
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        return Begun(step, calls)
