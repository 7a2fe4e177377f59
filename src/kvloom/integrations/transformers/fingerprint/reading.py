"""What functions, classes and attentions consist of, for descriptions of modules."""

import hashlib
import sys
import types
from functools import partial
from typing import Any, Final

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_KNOWN: Final = sys.stdlib_module_names | {"kvloom"}
"""Packages whose classes are identified by their names."""


def registered(name: str) -> tuple[Any, Any]:
    """Functions that attend and make masks, by the name of an attention."""
    return ALL_ATTENTION_FUNCTIONS.get(name), ALL_MASK_ATTENTION_FUNCTIONS.get(name)


def module_of(value: Any) -> str:
    """The Python module in which a function or the class of an object is defined, with a period."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, partial):
        value = value.func
    if not isinstance(value, types.FunctionType):  # within a cache, say
        value = getattr(value, "__wrapped__", value)
    if isinstance(value, types.FunctionType):  # ``functools.wraps`` changes ``__module__``
        return f"{value.__globals__.get('__name__')}."
    return f"{type(value).__module__}."


def is_own(space: Any) -> bool:
    """Whether a class or a module is neither Python's nor of an installed package."""
    name = space.__name__ if isinstance(space, types.ModuleType) else space.__module__
    if name.partition(".")[0] in _KNOWN:
        return False
    file = getattr(sys.modules.get(name, space), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def is_function(value: Any) -> bool:
    """Whether a value of a library's module is a function, or what took the place of one."""
    return callable(value) and not isinstance(value, (type, types.BuiltinFunctionType))


def function_in(member: Any) -> types.FunctionType | None:
    """The function of a member of a class, without its decorators that say so; ``None`` for other members."""
    found = getattr(member, "fget", None) or getattr(member, "__func__", member)
    return found if isinstance(found, types.FunctionType) else None


def is_member(name: str, value: Any) -> bool:
    """Whether a member of a class is a function or a plain value, and no part of Python's protocols."""
    is_special = name.startswith("__") and name != "__call__"
    return not is_special and not isinstance(value, (type, types.ModuleType, types.MemberDescriptorType))


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class."""
    said = [vars(owner).get("__slots__", ()) for owner in kind.__mro__]
    every = [x for names in said for x in ((names,) if isinstance(names, str) else names)]
    return [x for x in every if not x.startswith("__")]


def content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def code_digest(code: types.CodeType) -> str:
    consts = [code_digest(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
    parts = (code.co_code.hex(), consts, code.co_names, code.co_varnames, code.co_freevars)
    return digest_of(repr(parts))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
