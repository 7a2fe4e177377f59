"""A bad argument must be refused by name, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import Tensor

from oracles import bits
from oracles.pmx_cases import Call, with_copies


@dataclass(frozen=True)
class Bad:
    """One way to be wrong: ``change`` gives what it replaces, the message names one of ``names``."""

    what: str
    names: str
    change: Callable[[Call], Call]


def rows(table: list[Bad]) -> pytest.MarkDecorator:
    """Parametrise over ``table``; each row must have a name of its own."""
    assert len({bad.what for bad in table}) == len(table), "two rows of one name"
    return pytest.mark.parametrize("bad", table, ids=[re.sub(r"\W+", "-", bad.what) for bad in table])


def assert_refused(operator: Callable[..., object], good: Call, bad: Bad, error: type[Exception]) -> None:
    """The changed call raises ``error``, which is also a ValueError, and leaves every tensor as it was."""
    call = with_copies(good)
    call |= bad.change(call)
    originals = {name: x for name, x in call.items() if isinstance(x, Tensor) and x.device.type != "meta"}
    before = bits.snapshot(originals)
    with pytest.raises(ValueError, match=rf"\b({bad.names})\b") as raised:
        operator(**call)
    assert isinstance(raised.value, error)
    bits.assert_unchanged(originals, before)
