"""What decides the results of a module, read into lines of text.

Classes, attributes, configurations, hooks; code, closures and globals of functions that are no library code.
"""

import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import partial
from operator import itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvloom.integrations.transformers.invariance.layers import Invariant, names_in
from kvloom.integrations.transformers.invariance.packed_only import PackedOnly
from kvloom.integrations.transformers.rope import has_dynamic_rope

_BASE: Final = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_CHILDREN: Final = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")
_UNWATCHED: Final = frozenset(
    {
        "_experts_implementation_internal",  # rounds otherwise, and computes the same
        "_commit_hash",
        "_output_attentions",
        "_output_capturing_hooks_installed",
        "generation_config",
        "gradient_checkpointing",
        "loss_type",
        "max_seq_len_cached",  # of RoPE that depends on the length, which has namespaces of its own
        "name_or_path",
        "prepare_inputs_for_generation",  # which a PeftModel sets while it generates
        "_name_or_path",
        "rope_deltas",  # of the last text with pictures; positions are looked at in each forward
        "transformers_version",
        "use_cache",
        "warnings_issued",
        "_is_hf_initialized",
    }
)
_INERT: Final = ("kvloom.", "transformers.generation.")
"""Packages of classes whose objects do not decide what a model computes that has them."""
_CHANGING: Final = "kvloom.measuring."
"""A package of theirs whose hooks do."""
_PUBLISHED: Final = ("transformers.", "torch.")
"""Modules whose functions are known by their names."""
_EXACT_ATTENTION: Final = re.compile(r"(paged\|)?(eager|sdpa|flash_|flex_|flashinfer|kvloom)")
_ATTENTION: Final = "_attn_implementation_internal"
_LONG: Final = 200
"""Characters beyond which a text is a digest."""
_DEPTH: Final = 8
_MOST: Final = 4096
"""Items of a container that is read."""


def behavior_digest(model: nn.Module) -> str:
    """A digest of what a model does with its weights: classes, attributes, hooks, functions of its modules.

    It is the same in every process. Tensors are left out.
    """
    lines = sorted(ModuleReader(has_tensors=False).read_model(model))
    return hashlib.sha256(repr(lines).encode()).hexdigest()


class ModuleReader:
    """Reads what decides the results of a module into lines of text, and collects what is to be watched.

    Attributes:
        containers: Whose lengths are watched.
        getters: Functions that give watched values, the same number each time.
        tensors: Weights, buffers and tensors in attributes.

    Args:
        has_tensors: Whether tensors, configurations and training mode are read, too.
        opaque: Numbers of objects that show nothing of themselves, by their ids, to be added to; ``None`` for
            a description that other processes must have, too.
    """

    def __init__(self, has_tensors: bool = True, opaque: dict[int, tuple[int, object]] | None = None) -> None:
        self.containers: list[Any] = []
        self.getters: list[Callable[[], Any]] = []
        self.tensors: list[Tensor] = []
        self._has_tensors = has_tensors
        self._opaque = opaque
        self._texts: dict[int, str] = {}  # of objects that are read, by their ids
        self._kept: list[Any] = []  # so that no other object gets those ids

    def read_model(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Paths and texts of all modules."""
        modules = dict(model.named_modules())
        self._texts = {id(module): f"<{path or 'model'}>" for path, module in modules.items()}
        for path, module in modules.items():
            yield from self._module(path or "model", module)

    def _module(self, path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
        known = vars(module)
        yield path, self._kind(type(module))
        if isinstance(module, PackedOnly) and self._opaque is not None:  # whose weight is no parameter
            yield f"{path}.packed", self._number(module.packed)
        own = [name for name in known if name not in _BASE and not self._is_ignored(module, name)]
        self.containers.append(known)
        self._watch_keys(known, [*own, "training"])
        if self._has_tensors:
            yield f"{path}.training", str(module.training)
        for name in own:
            # Its own, put into the instance, as transformers before 5 leaves it there.
            if getattr(known[name], "__func__", None) is not type(module).forward:
                yield from self._named(f"{path}.{name}", name, known[name])
        for name in _CHILDREN:
            children = known[name]
            self.containers.append(children)
            keys = [key for key in children if not self._is_ignored(module, key)]
            self._watch_keys(children, keys)
            for key in keys:
                child = children[key]
                if "hooks" not in name:
                    yield from self._named(f"{path}.{key}", key, child)
                elif not (_is_inert(child) or _module_of(child).startswith("transformers.")):
                    # Its number differs from process to process.
                    yield f"{path}.{name}.{keys.index(key)}", self._text(child, 0)

    def _is_ignored(self, module: nn.Module, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if (
            not self._has_tensors
            and isinstance(module, PreTrainedModel)
            and name.startswith(("_", "all_tied"))
        ):
            return True
        is_rope = name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        return name in _UNWATCHED or (is_rope and has_dynamic_rope(module))

    def _named(self, path: str, name: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, PretrainedConfig) and self._has_tensors and id(value) not in self._texts:
            self._texts[id(value)] = f"<{path}>"
            self._kept.append(value)
            known = vars(value)
            names = [key for key in known if key not in _UNWATCHED]
            self.containers.append(known)
            self._watch_keys(known, names)
            for key in names:
                yield from self._named(f"{path}.{key}", key, known[key])
        elif text := self._attention(value) if name == _ATTENTION else self._text(value, 0):
            yield path, text

    def _watch_keys(self, known: Mapping[str, Any], names: list[str]) -> None:
        if len(names) == 1:
            self.getters.append(partial(_one, known, names[0]))
        elif names:
            self.getters.append(partial(itemgetter(*names), known))

    def _text(self, value: Any, depth: int) -> str:
        """What a value is, the same in every process; empty if it decides nothing."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.device, torch.Size, Enum, range, slice)):
            return str(value)
        if id(value) in self._texts:
            return self._texts[id(value)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if _is_inert(value) or (not self._has_tensors and isinstance(value, PretrainedConfig)):
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
        """What an object consists of."""
        if isinstance(value, nn.Module):  # one that is no child of the model
            return "; ".join(f"{path} {text}" for path, text in self._module("module", value))
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._container(value, depth)
        if isinstance(value, types.MethodType):
            return f"{self._text(value.__func__, depth + 1)} of {self._text(value.__self__, depth + 1)}"
        if isinstance(value, partial):
            return " ".join(self._text(x, depth + 1) for x in (value.func, value.args, value.keywords))
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        return self._object(value, depth)

    def _kind(self, kind: type[nn.Module]) -> str:
        """A class of modules, and what it computes unless that is a library's."""
        if id(kind) not in self._texts:
            self._kept.append(kind)
            if issubclass(kind, Invariant):
                self._texts[id(kind)] = f"{self._kind(kind.original)}, {kind.numerics}"
                return self._texts[id(kind)]
            owner = next(x for x in kind.__mro__ if "forward" in vars(x))
            self._watch_keys(vars(owner), ["forward"])
            self._texts[id(kind)] = f"{kind.__module__}.{kind.__qualname__} {self._text(kind.forward, 0)}"
        return self._texts[id(kind)]

    def _tensor(self, value: Tensor) -> str:
        if not self._has_tensors:
            return ""
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
        """By its name if it is a library's, else by its code and all that the code refers to."""
        name = f"{_module_of(value)}{value.__qualname__}"
        cells = value.__closure__ or ()
        self.getters.append(lambda: (value.__code__, value.__defaults__, *map(_content, cells)))
        parts = [*map(_content, cells)]
        if not name.startswith(_PUBLISHED):
            names = [x for x in sorted(names_in(value.__code__)) if x in value.__globals__]
            used = [x for x in names if not isinstance(value.__globals__[x], (type, types.ModuleType))]
            self._watch_keys(value.__globals__, used)
            parts += [value.__globals__[x] for x in used]
            parts += [value.__defaults__, value.__kwdefaults__]
            name = f"{name} {_code_digest(value.__code__)}"
        return f"<{name} {', '.join(self._text(x, depth + 1) for x in parts)}>"

    def _object(self, value: Any, depth: int) -> str:
        known = getattr(value, "__dict__", None)
        if known is None:
            return f"<{type(value).__qualname__}{self._number(value)}>"
        names = [name for name in known if name not in _UNWATCHED]
        self.containers.append(known)
        self._watch_keys(known, names)
        texts = (f"{name}={self._text(known[name], depth + 1)}" for name in sorted(names))
        kind = type(value)
        return f"<{kind.__module__}.{kind.__qualname__} {', '.join(texts)}>"

    def _number(self, value: object) -> str:
        """What tells an object that shows nothing from others in this process."""
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array of numpy
            return f" {value.dtype} {digest_of(value.tobytes().hex())}"
        if self._opaque is None:
            return ""
        return f" {self._opaque.setdefault(id(value), (len(self._opaque), value))[0]}"

    def _attention(self, name: object) -> str:
        """An implementation of attention: all of transformers and of this library compute the same."""
        return "" if not isinstance(name, str) or _EXACT_ATTENTION.match(name) else name


def _one(known: Mapping[str, Any], name: str) -> tuple[Any]:
    return (known[name],)


def _is_inert(value: Any) -> bool:
    home = f"{type(value).__module__}."
    return home.startswith(_INERT) and not home.startswith(_CHANGING)


def _module_of(value: Any) -> str:
    """The Python module in which a function or the class of an object is defined, with a period."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, partial):
        value = value.func
    if isinstance(value, types.FunctionType):  # whose own word functools.wraps changes
        return f"{value.__globals__.get('__name__')}."
    return f"{type(value).__module__}."


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _code_digest(code: types.CodeType) -> str:
    consts = [_code_digest(x) if isinstance(x, types.CodeType) else repr(x) for x in code.co_consts]
    parts = (code.co_code.hex(), consts, code.co_names, code.co_varnames, code.co_freevars)
    return digest_of(repr(parts))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
