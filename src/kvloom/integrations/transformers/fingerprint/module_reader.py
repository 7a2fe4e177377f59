"""Description of everything that decides the results of a module, as lines of text.

It has classes, attributes, configurations, hooks, and of functions that are no library code their code,
closures and globals.
"""

import hashlib
import re
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvloom.integrations.tensor_state import sum_of
from kvloom.integrations.transformers.fingerprint.reading import (
    code_digest,
    content,
    digest_of,
    function_in,
    is_function,
    is_member,
    is_own,
    module_of,
    registered,
    slots_of,
)
from kvloom.integrations.transformers.fingerprint.unread import UNWATCHED, is_inert
from kvloom.integrations.transformers.invariance.install import CHANGES, varies_in_attention
from kvloom.integrations.transformers.invariance.layers import Invariant, names_in
from kvloom.integrations.transformers.invariance.packed_only import PackedOnly
from kvloom.integrations.transformers.models.remembered import remembered_names
from kvloom.integrations.transformers.models.rope import has_dynamic_rope

_ROOT: Final = "model"
"""Path of the model itself; those of its modules begin with it, so that a child of this name has another."""
_BASE: Final = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_CHILDREN: Final = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_PUBLISHED: Final = ("transformers.", "torch.")
"""Packages whose functions are identified by their names."""
_INTACT: Final = (*_PUBLISHED, "kvloom.")
"""Packages whose functions may be where a library's own are looked for."""
_SEARCHED: Final = "transformers.models."
"""Package whose functions are searched for others that took the place of those that they call."""
_MODELS: Final = (_SEARCHED, "torch.nn.modules.")
"""Packages of libraries whose classes compute."""
_WITH_NAMES: Final = "_with_kwargs"
"""End of the name of the hooks that are given arguments by their names."""
_OF_ALL: Final = ("_global_forward_pre_hooks", "_global_forward_hooks")
_CALLED: Final = ("embedding", "gelu", "linear", "scaled_dot_product_attention", "silu", "softmax")
"""Functions of ``torch.nn.functional`` that models call, also by the functions of other packages."""
_SPACES: Final = {
    "torch": vars(torch),
    "torch.nn.functional": vars(nn.functional),
    "torch.Tensor": vars(torch.Tensor),
}
"""Where torch's functions are looked for, among which others may take their place."""
_OF_TORCH: Final = ("torch.", "builtins.", "kvloom.")
_EXACT_ATTENTION: Final = re.compile(r"(paged\|)?(eager|sdpa|flash_|flex_|flashinfer|kvloom)")
_ATTENTION: Final = "_attn_implementation_internal"
_LONG: Final = 200
"""Length in characters beyond which a text is replaced by a digest."""
_DEPTH: Final = 8
_MOST: Final = 4096
"""Maximum number of items of a container that is read."""


def behavior_digest(model: nn.Module) -> str:
    """A digest of classes, attributes, hooks and functions of a model's modules, without its weights.

    It is the same in every process.
    """
    lines = sorted(ModuleReader(has_tensors=False).read_model(model))
    return hashlib.sha256(repr(lines).encode()).hexdigest()


class ModuleReader:
    """Reader that describes a module in lines of text, and collects the objects to be watched.

    Attributes:
        containers: Containers whose lengths are watched.
        getters: Functions that return watched values, the same number each time.
        tensors: Weights, buffers and tensors in attributes.
        arrays: Arrays of numpy.

    Args:
        has_tensors: Whether to watch tensors, and to read configurations and training mode, too. Else the
            bytes of tensors are read, except those of the model's own weights and buffers.
        opaque: Numbers of objects without readable attributes, by their ids; the reader adds to it. ``None``
            for a description that is the same in other processes.
    """

    def __init__(self, has_tensors: bool = True, opaque: dict[int, tuple[int, object]] | None = None) -> None:
        self.containers: list[Any] = []
        self.getters: list[Callable[[], Any]] = []
        self.tensors: list[Tensor] = []
        self.arrays: list[Any] = []
        self._has_tensors = has_tensors
        self._opaque = opaque
        self._searched: set[int] = set()  # functions of libraries
        self._called = set(_CALLED)  # names in these functions
        self._texts: dict[int, str] = {}  # texts of objects that were read, by their ids
        self._kept: list[Any] = []  # keeps these objects alive, so that their ids stay unique

    def read_model(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Paths and texts of all modules."""
        modules = {f"{_ROOT}.{path}" if path else _ROOT: module for path, module in model.named_modules()}
        self._texts = {id(module): f"<{path}>" for path, module in modules.items()}
        self.getters.append(partial(map, type, modules.values()))
        for path, module in modules.items():
            yield from self._module(path, module)
        for name in _OF_ALL:
            hooks = getattr(nn.modules.module, name)
            self.containers.append(hooks)
            self._watch_keys(hooks, [*hooks])
            named = getattr(nn.modules.module, f"{name}{_WITH_NAMES}", ())
            texts = [self._hook(x, key in named) for key, x in hooks.items() if not is_inert(x)]
            yield from [(f"every module.{name}", ", ".join(texts))] if texts else []
        for path, known in _SPACES.items():
            self.containers.append(known)
            called = [x for x in sorted(self._called & known.keys()) if not isinstance(known[x], type)]
            self._watch_keys(known, called)
            for name, function in ((x, known[x]) for x in called):
                is_same = name not in _CALLED or getattr(function, "__name__", "") == name
                if not (is_same and module_of(function).startswith(_OF_TORCH)):
                    yield f"{path}.{name}", self._text(function, 0)

    def _module(self, path: str, module: nn.Module, is_part: bool = True) -> Iterator[tuple[str, str]]:
        """Paths and texts of a module, which is a part of the model or, say, of one of its hooks."""
        known, is_weightless = vars(module), is_part and not self._has_tensors
        yield path, self._kind(type(module))
        if CHANGES in known:
            self.getters.append(lambda: (varies_in_attention(module),))
            if varies_in_attention(module):
                yield f"{path}.attention", "not batch invariant, as the layers are"
        if isinstance(module, PackedOnly) and self._opaque is not None:  # its weight is no parameter
            yield f"{path}.packed", self._number(module.packed)
        own = [name for name in known if name not in _BASE and not self._is_ignored(module, name)]
        if is_weightless and f"{type(module).__module__}.".startswith(
            _PUBLISHED
        ):  # made of the configuration
            own = [name for name in own if not isinstance(known[name], Tensor)]
        self.containers.append(known)
        self._watch_keys(known, [*own, "training"])
        if self._has_tensors:
            yield f"{path}.training", str(module.training)
        for name in own:
            # transformers before 5 leaves the class's own ``forward`` in the instance.
            if getattr(known[name], "__func__", None) is not type(module).forward:
                yield from self._named(f"{path}.{name}", name, known[name])
        for name in _CHILDREN[2:] if is_weightless else _CHILDREN:
            children = known[name]
            self.containers.append(children)
            keys = [key for key in children if not self._is_ignored(module, key)]
            self._watch_keys(children, keys)
            for key in keys:
                child = children[key]
                if "hooks" not in name:
                    yield from self._named(f"{path}.{key}", key, child)
                elif not (is_inert(child) or module_of(child).startswith("transformers.")):
                    # Named by its index, since the key of a hook differs between processes.
                    is_named = key in known[f"{name}{_WITH_NAMES}"]
                    yield f"{path}.{name}.{keys.index(key)}", self._hook(child, is_named)

    def _hook(self, hook: Any, is_named: bool) -> str:
        """Description of a hook, and of whether it is given arguments by their names, too."""
        return self._text(hook, 0) + " with names" * is_named

    def _is_ignored(self, module: nn.Module, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if (
            not self._has_tensors
            and isinstance(module, PreTrainedModel)
            and name.startswith(("_", "all_tied"))
        ):
            return True
        is_pruned = f"{name}_orig" in module._parameters  # made of that in each forward
        if is_pruned or name in UNWATCHED or name in remembered_names(module):
            return True
        is_rope = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        return is_rope and has_dynamic_rope(module)

    def _named(self, path: str, name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, PretrainedConfig) and self._has_tensors and id(value) not in self._texts:
            self._texts[id(value)] = f"<{path}>"
            self._kept.append(value)
            known = vars(value)
            names = [key for key in known if key not in UNWATCHED]
            self.containers.append(known)
            self._watch_keys(known, names)
            for key in names:
                yield from self._named(f"{path}.{key}", key, known[key])
        elif text := self._attention(value) if name == _ATTENTION else self._text(value, 0):
            yield path, text
        elif isinstance(value, PretrainedConfig) and not self._has_tensors:
            if foreign := self._foreign_attention(vars(value).get(_ATTENTION)):
                yield f"{path}.{_ATTENTION}", foreign

    def _watch_keys(self, known: Mapping[str, Any], names: list[str]) -> None:
        if len(names) == 1:
            self.getters.append(partial(_one, known, names[0]))
        elif names:
            self.getters.append(partial(itemgetter(*names), known))

    def _text(self, value: Any, depth: int) -> str:
        """Description of a value, the same in every process; empty if it changes no results."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.device, torch.Size, Enum, range, slice)):
            return str(value)
        if id(value) in self._texts:
            return self._texts[id(value)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if is_inert(value) or (not self._has_tensors and isinstance(value, PretrainedConfig)):
            return ""
        if depth >= _DEPTH:
            return f"<{type(value).__qualname__}>"
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return f"<{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}>"
        self._texts[id(value)] = f"<{type(value).__qualname__} that refers to itself>"
        self._kept.append(value)
        text = self._parts(value, depth)
        self._texts[id(value)] = text = text if len(text) <= _LONG else digest_of(text)
        return text

    def _parts(self, value: Any, depth: int) -> str:
        """Description of the parts of an object."""
        if isinstance(value, nn.Module):  # one that is no child of the model
            return "; ".join(f"{path} {text}" for path, text in self._module("module", value, is_part=False))
        if isinstance(value, (list, tuple, set, frozenset, dict, deque)):
            return self._container(value, depth)
        if isinstance(value, types.MethodType):
            return f"{self._text(value.__func__, depth + 1)} of {self._text(value.__self__, depth + 1)}"
        if isinstance(value, partial):
            return " ".join(self._text(x, depth + 1) for x in (value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        return self._object(value, depth)

    def _kind(self, kind: type[nn.Module]) -> str:
        """Description of a class of modules, with its ``forward``."""
        if id(kind) not in self._texts:
            self._kept.append(kind)
            if issubclass(kind, Invariant):
                self._texts[id(kind)] = f"{self._kind(kind.original)}, {kind.numerics}"
                return self._texts[id(kind)]
            owner = next(x for x in kind.__mro__ if "forward" in vars(x))
            self._watch_keys(vars(owner), ["forward"])
            members = "".join(f", {x}" for x in self._members(kind, "forward"))
            forward = self._text(kind.forward, 0)
            self._texts[id(kind)] = f"{kind.__module__}.{kind.__qualname__} {forward}{members}"
        return self._texts[id(kind)]

    def _tensor(self, value: Tensor) -> str:
        if not self._has_tensors:
            return sum_of(value)
        self.tensors.append(value)
        return f"{value.dtype} {list(value.shape)} {value.device}"

    def _container(self, value: Any, depth: int) -> str:
        self.containers.append(value)
        if len(value) > _MOST:  # a vocabulary, say
            return f"<{type(value).__qualname__} of {len(value)}>"
        if isinstance(value, Mapping):
            self.getters.append(value.values)
            items = [f"{key!r}: {self._text(x, depth + 1)}" for key, x in value.items()]
            return "{" + ", ".join(items) + "}"
        self.getters.append(partial(iter, value))
        texts = [self._text(x, depth + 1) for x in value]
        return f"[{', '.join(sorted(texts) if isinstance(value, (set, frozenset)) else texts)}]"

    def _function(self, value: types.FunctionType, depth: int) -> str:
        """Description of a function: its name, and unless a library has it, its code and all it refers to.

        Of a library's function, those that took the place of other functions of the library.
        """
        name = f"{module_of(value)}{value.__qualname__}"
        cells = value.__closure__ or ()
        self.getters.append(
            lambda: (value.__code__, value.__defaults__, value.__kwdefaults__, *map(content, cells))
        )
        parts = [*map(content, cells)]
        if name.startswith(_PUBLISHED):
            parts += self._replaced(value)
        else:
            names = sorted(names_in(value.__code__))
            parts += self._named_in(value.__globals__, names)
            for space in (value.__globals__.get(x) for x in names):
                if isinstance(space, (type, types.ModuleType)) and is_own(space):
                    parts += self._named_in(vars(space), names)
            parts += [value.__defaults__, value.__kwdefaults__]
            self.containers.append(value.__dict__)
            parts += self._named_in(value.__dict__, sorted(value.__dict__.keys() - {"__wrapped__"}))
            name = f"{name} {code_digest(value.__code__)}"
        return f"<{name} {', '.join(self._text(x, depth + 1) for x in parts)}>"

    def _named_in(self, known: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        """Values of names in a namespace, except classes and modules; they are watched."""
        used = [x for x in names if x in known and not isinstance(known[x], (type, types.ModuleType))]
        self._watch_keys(known, used)
        return [known[x] for x in used]

    def _replaced(self, function: types.FunctionType) -> list[Any]:
        """Foreign functions in the places of those that a library's function calls, directly or not."""
        if id(function) in self._searched:
            return []
        self._searched.add(id(function))
        self._called |= names_in(function.__code__)
        known, found = function.__globals__, []
        called = [x for x in sorted(names_in(function.__code__)) if is_function(known.get(x))]
        self._watch_keys(known, called)
        for other in (known[x] for x in called):
            if not module_of(other).startswith(_INTACT):
                found.append(other)
            elif isinstance(other, types.FunctionType) and module_of(other).startswith(_SEARCHED):
                found += self._replaced(other)
        return found

    def _members(self, kind: type, entry: str) -> Iterator[str]:
        """Members of a class that one of its functions refers to, directly or not.

        Of a library's class, functions that took the place of its own.
        """
        owners = [x for x in kind.__mro__ if x not in (object, nn.Module) and _is_read(x)]
        names, new = set[str](), {entry}
        while new:
            names |= new
            members = [vars(owner)[x] for owner in owners for x in sorted(new) if x in vars(owner)]
            new = set().union(*(names_in(x.__code__) for x in map(function_in, members) if x)) - names
        self._called |= names
        for owner in owners:
            known, is_library = vars(owner), f"{owner.__module__}.".startswith(_INTACT)
            own = sorted(known if is_library else names & known.keys())
            own = [x for x in own if is_member(x, known[x]) and x not in UNWATCHED]
            self.containers.append(known)
            self._watch_keys(known, own)
            for name in own:
                function = function_in(known[name])
                is_foreign = function is not None and not module_of(function).startswith(_INTACT)
                is_entry = known[name] is getattr(kind, entry, None)
                if not is_entry and (is_foreign or not is_library):
                    yield f"{owner.__qualname__}.{name} {self._text(function or known[name], 1)}"

    def _object(self, value: Any, depth: int) -> str:
        known, kind = getattr(value, "__dict__", None), type(value)
        members = "".join(f", {x}" for x in self._members(kind, "__call__")) if is_own(kind) else ""
        slots = [x for x in slots_of(kind) if hasattr(value, x)] if is_own(kind) else []
        if slots:
            self.getters.append(lambda: tuple(getattr(value, x, None) for x in slots))
            members += "".join(f", {x}={self._text(getattr(value, x), depth + 1)}" for x in slots)
        if known is None:
            return f"<{kind.__qualname__}{self._number(value)}{members}>"
        names = [name for name in known if name not in UNWATCHED]
        self.containers.append(known)
        self._watch_keys(known, names)
        texts = (f"{name}={self._text(known[name], depth + 1)}" for name in sorted(names))
        return f"<{kind.__module__}.{kind.__qualname__} {', '.join(texts)}{members}>"

    def _number(self, value: object) -> str:
        """Text that tells an object without readable attributes from others in this process."""
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array of numpy
            self.arrays.append(value)
            return f" {value.dtype} {digest_of(value.tobytes().hex())}"
        if self._opaque is None:
            return ""
        return f" {self._opaque.setdefault(id(value), (len(self._opaque), value))[0]}"

    def _attention(self, name: object) -> str:
        """Name of an attention implementation; empty for those of transformers and kvloom, which agree."""
        if foreign := self._foreign_attention(name):
            return foreign
        return "" if not isinstance(name, str) or _EXACT_ATTENTION.match(name) else name

    def _foreign_attention(self, name: object) -> str:
        """Description of what is registered under the name of an attention; empty for what libraries have."""
        if not isinstance(name, str):
            return ""
        self.getters.append(partial(registered, name))
        found = [x for x in registered(name) if x is not None and not module_of(x).startswith(_INTACT)]
        return f"{name} {', '.join(self._text(x, 1) for x in found)}" if found else ""


def _one(known: Mapping[str, Any], name: str) -> tuple[Any]:
    return (known[name],)


def _is_read(kind: type) -> bool:
    """Whether members of a class may change what a module computes."""
    home = f"{kind.__module__}."
    return home.startswith(_MODELS) or not home.startswith(_INTACT)
