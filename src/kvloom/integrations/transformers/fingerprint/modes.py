"""What somebody put in front of torch's functions and operators: modes, and operators of a library.

Modes hold for a thread, operators for a process.
"""

from typing import Any, Final
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_NAMES: Final[WeakKeyDictionary[object, str]] = WeakKeyDictionary()
"""Names of modes, each of which nobody has in another process: what they do is not read."""
_OF_TORCH: Final = "torch."
"""Package whose modes observe, name a device, or compute no values."""
_OPERATORS: Final = "aten/"
_WITHOUT_VALUES: Final = "aten/_", "Meta", "MPS", "FuncTorchBatched"
"""Operators that models do not call, and keys that are no part of a state: torch itself registers some of the
last, those of ``vmap``, when a part of it is imported."""


_LAST: Final[list[tuple[set[str], tuple[str, ...]]]] = [(set(), ())]
"""Names of operators that were looked at last, and those of them that count."""


def foreign_modes() -> tuple[str, ...]:
    """Names of the active modes that torch does not have itself, the first one first; takes a microsecond."""
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        return ()
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return tuple(_name(x) for x in modes if not f"{type(x).__module__}.".startswith(_OF_TORCH))


def _name(mode: Any) -> str:
    kind = type(mode)
    return _NAMES.setdefault(mode, f"{kind.__module__}.{kind.__qualname__} {uuid4().hex}")


def replaced_operators() -> tuple[str, ...]:
    """Names of torch's operators that a ``torch.library.Library`` computes, with keys of devices.

    Each call compares all names with those of the call before, which takes 7 microseconds: as many others may
    have come as have gone.
    """
    known: set[str] = getattr(torch.library, "_impls", set())
    before, found = _LAST[0]
    if known != before:
        name, *unread = _WITHOUT_VALUES
        own = (x for x in known if x.startswith(_OPERATORS) and not x.startswith(name))
        found = tuple(sorted(x for x in own if not x.endswith(tuple(unread))))
        _LAST[0] = known.copy(), found
    return found
