"""Tensor allocations that fail, one of a program after the other; then the step that it broke is tried again.

``pytest --campaign`` tries each of them; else every fourth of a step, from another one
on in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from campaign import is_whole
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

STRIDE = 1 if is_whole() else 4


class Refusing(TorchDispatchMode):
    """The n-th operator that makes a tensor finds no memory. Kernels of this library may need some, too."""

    __module__ = "torch.utils"  # it computes nothing: pools find pages within it, as within torch's own modes

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if func.namespace == "kvloom" or any(
            "Tensor" in str(x.type) and x.alias_info is None for x in returns
        ):
            self.count += 1
            if self.count == self.fail_at:
                raise torch.OutOfMemoryError("refused by the test")
        return func(*args, **kwargs or {})


class Run:
    """A program in steps, each refused memory at one allocation, at a later one, until it is done.

    Args:
        look: What can be seen between steps; a step that raised must leave it as it was.
        check: Raises if the inside is not as it should be.
        is_refused: Whether memory is refused at all.
    """

    def __init__(
        self, look: Callable[[], list[Tensor]], check: Callable[[], object], is_refused: bool
    ) -> None:
        self.look, self.check, self.is_refused = look, check, is_refused
        self.num_refused = self.num_steps = 0
        self.seen: list[Tensor] = []

    def step(self, change: Callable[[], Any], recover: Callable[[], object] | None = None) -> None:
        """Run ``change``; when it is refused memory, ``recover``, see that nothing has changed, try again."""
        before = self.look()
        self.num_steps += 1
        for fail_at in count(1 + self.num_steps % STRIDE, STRIDE):
            try:
                with Refusing(fail_at) if self.is_refused else nullcontext():
                    result = change()
                break
            except (torch.OutOfMemoryError, MemoryError):
                self.num_refused += 1
                if recover is not None:
                    recover()
                same(self.look(), before)
                self.check()
        self.check()
        self.seen += [x.clone() for x in result or () if isinstance(x, Tensor)]
        self.seen += self.look()


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    """The same tensors, bit for bit."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def every_failure(program: Callable[[bool], Run]) -> int:
    """Run a program with each of its allocations refused; it must end as the one that nobody refused.

    Returns:
        How many were refused.
    """
    expected, run = program(False), program(True)
    same(run.seen, expected.seen)
    assert expected.num_refused == 0
    return run.num_refused
