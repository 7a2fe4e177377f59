"""What a model remembers of a text outside of its cache, such as the offset of positions behind pictures.

Models of transformers keep that in attributes of a module, where one forward writes it and a later one reads
it. There each text takes for its own what was remembered of the last one. Here each cache has its own, which
is given to the module before it is read: when a model asks the cache for its length, and before each forward.

Shapes: B rows.
"""

import dis
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache as cached
from types import CodeType, FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvloom.errors import StateError
from kvloom.integrations.transformers.models.content import placeholders_of

Values: TypeAlias = tuple[Any, ...]
"""Values of the attributes of a module, in the order of ``Memory.names``; ``None`` for nothing."""
_OF_LIBRARY: Final = "transformers.models."
_MARK: Final = re.compile("_(start|end)_")
"""Part of the names of tokens before and after pictures, which are text."""


def remembered_names(module: nn.Module) -> tuple[str, ...]:
    """Attributes of a model's module that begin as ``None``, and that its forward writes.

    Only code of transformers' models counts: what others' modules write is a change of the model.
    """
    kind: Any = type(module)
    return _names_of(kind)


@cached
def _names_of(kind: Any) -> tuple[str, ...]:
    owners = [x for x in kind.__mro__ if f"{x.__module__}.".startswith(_OF_LIBRARY)]
    if not issubclass(kind, PreTrainedModel) or not owners:
        return ()
    known: dict[str, list[CodeType]] = {}
    for owner in owners:
        for name, member in vars(owner).items():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType):
                known.setdefault(name, []).append(function.__code__)
    begun = {name for code in known.get("__init__", ()) for name in _set_to_none(code)}
    called, new = set[str](), {"forward"}
    while new:
        called |= new
        named = (code.co_names for name in new for code in known.get(name, ()))
        new = {name for names in named for name in names if name in known} - called
    steps = (step for name in called for code in known.get(name, ()) for step in dis.get_instructions(code))
    written = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    return tuple(sorted(begun & written))


def _set_to_none(code: CodeType) -> Iterator[str]:
    """Attributes that code sets to ``None``."""
    steps = [*dis.get_instructions(code)]
    for value, _, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "STORE_ATTR" and value.opname == "LOAD_CONST" and value.argval is None:
            yield step.argval


class Remembered:
    """What a model remembers of the text of one cache.

    Attributes:
        memory: Memory of the model that computes the text; ``None`` if it remembers nothing, or if the cache
            was loaded and no forward has seen it since.
        notes: For each forward that changed the values, the number of tokens before it, that of tokens up to
            the last one that decided them, and the values.
        is_lost: Whether tokens were removed that decided the values: they may be those of a longer text.
    """

    def __init__(self, memory: "Memory | None" = None) -> None:
        self.memory = memory
        self.notes: list[tuple[int, int, Values]] = []
        self.is_lost = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"memory": None}

    @property
    def values(self) -> Values:
        """Values after the last forward; empty if none wrote any."""
        return self.notes[-1][2] if self.notes else ()

    def claim(self) -> None:
        """Take what the model remembers now, as ``generate`` makes positions before it makes a cache."""
        if self.memory is not None:
            self.memory.owner = self

    def fork(self) -> "Remembered":
        """The same for another cache of the same text."""
        other = Remembered(self.memory)
        other.notes, other.is_lost = [*self.notes], self.is_lost
        return other

    def note(self, begin: int, end: int, values: Values) -> None:
        """Note the values after a forward of tokens after ``begin``, which those up to ``end`` decided."""
        self.notes.append((begin, end, values))

    def truncate(self, num_tokens: int) -> None:
        """Go back to the values after the last forward that began within the first ``num_tokens``."""
        kept = [note for note in self.notes if note[0] < num_tokens]
        self.is_lost &= num_tokens > 0
        self.is_lost |= bool(kept) and kept[-1][1] > num_tokens and not _are_zero(kept[-1][2])
        self._become(kept)

    def select(self, rows: Sequence[int], num_rows: int) -> None:
        """Replace row i of ``num_rows`` rows by row ``rows[i]``."""

        def selected(value: Any) -> Any:
            return rows_of(value, num_rows)[torch.tensor(rows)] if is_offset(value, num_rows) else value

        self._become([(begin, end, tuple(map(selected, values))) for begin, end, values in self.notes])

    def _become(self, notes: list[tuple[int, int, Values]]) -> None:
        self.notes = notes
        if self.memory is not None and self.memory.owner is self:
            self.memory.owner = None  # the model is given the values again


class Memory:
    """The attributes in which a module remembers a text, and the cache whose text they are of.

    Args:
        module: A module whose class has ``remembered_names``.

    Attributes:
        names: Names of the attributes.
        pictures: Tokens in the place of pictures and the like, which decide the values.
        owner: What the values are of; ``None`` if a forward without a cache of ours may have written them.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self.names = remembered_names(module)
        self.pictures = frozenset(
            token for token, name in placeholders_of(module.config).items() if not _MARK.search(name)
        )
        self.owner: Remembered | None = None
        self._length = 0  # tokens in the cache when the forward began
        module.register_forward_pre_hook(_Before(self), with_kwargs=True)
        module.register_forward_hook(_After(self), with_kwargs=True, always_call=True)

    def present(self) -> Values:
        """Values of the module now."""
        return tuple(getattr(self._module, name, None) for name in self.names)

    def give(self, owner: Remembered) -> None:
        """Give the module what it remembers of the text of ``owner``, unless it has that."""
        if self.owner is not owner:
            self._set(owner.values)
            self.owner = owner

    def _set(self, values: Values) -> None:
        for name, value in zip(self.names, values or (None,) * len(self.names), strict=True):
            setattr(self._module, name, value)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Context in which the module remembers nothing; afterwards it remembers what it did."""
        before = self.present(), self.owner
        self._set(())
        self.owner = None
        try:
            yield
        finally:
            self._set(before[0])
            self.owner = before[1]

    def before(self, cache: Any, has_positions: bool) -> None:
        """Begin a forward with any cache or none; ``has_positions`` if it is given positions.

        Raises:
            StateError: positions were made before the module could be given what it remembers of their text.
        """
        own = getattr(cache, "remembered", None)
        if not isinstance(own, Remembered):
            self.owner = None
            return
        if own.memory is not self:  # of a cache that was loaded, or made without the model
            own.memory = self
            if has_positions and not own.notes and not int(cache.get_seq_length()):
                self.owner = own  # what was made with the positions
            elif has_positions and not _are_same(own.values, self.present()):
                self.give(own)
                raise StateError(
                    f"{', '.join(self.names)} of {type(self._module).__name__} must be of the text of the "
                    f"cache when positions are made, got another's: the model knows the cache from now on, "
                    f"repeat the call"
                )
        self.give(own)
        self._length = int(cache.get_seq_length())

    def after(self, cache: Any, input_ids: Any, is_done: bool) -> None:
        """End a forward of tokens, if these are given; ``is_done`` if it did not raise."""
        own = getattr(cache, "remembered", None)
        if not isinstance(own, Remembered) or own is not self.owner or not is_done:
            self.owner = None
        elif not _are_same(own.values, now := self.present()):
            end = int(cache.get_seq_length())
            if isinstance(input_ids, Tensor):
                pictures = torch.tensor([*self.pictures], device=input_ids.device)
                where = torch.isin(input_ids, pictures).any(0).nonzero()
                end = self._length + int(where.max()) + 1 if len(where) else end
            own.note(self._length, end, now)


class _Hook:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory


class _Before(_Hook):
    """Forward pre-hook of a module that remembers."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.memory.before(_cache_among(args, kwargs), kwargs.get("position_ids") is not None)


class _After(_Hook):
    """Forward hook of a module that remembers, also called after an error."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling():
            input_ids = kwargs.get("input_ids", args[0] if args else None)
            self.memory.after(_cache_among(args, kwargs), input_ids, output is not None)


def _cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument that is a cache of ours."""
    given = (x for x in (*args, *kwargs.values()) if isinstance(getattr(x, "remembered", None), Remembered))
    return next(given, None)


def memories_of(model: nn.Module) -> list[Memory]:
    """Memories of all modules of a model that remember texts, the outermost first."""
    found = []
    for module in model.modules():
        if remembered_names(module):
            hooks = (x for x in module._forward_pre_hooks.values() if isinstance(x, _Before))
            hook = next(hooks, None)
            found.append(Memory(module) if hook is None else hook.memory)
    return found


def memory_of(model: nn.Module) -> Memory | None:
    """Memory of the texts of a model; ``None`` if it remembers nothing outside of its cache."""
    return next(iter(memories_of(model)), None)


def is_offset(value: Any, num_rows: int) -> bool:
    """Whether a value is an offset of positions in each row, ``[B, 1]``, which holds whatever text follows.

    With ``num_rows`` a multiple of B, each is that of as many rows in a row.
    """
    is_integer = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return is_integer and value.ndim == 2 and value.shape[1] == 1 and num_rows % max(len(value), 1) == 0


def rows_of(value: Tensor, num_rows: int) -> Tensor:
    """An offset with a row for each of ``num_rows``."""
    return value.repeat_interleave(num_rows // max(len(value), 1), dim=0)


def _are_same(some: Values, others: Values) -> bool:
    """Whether values are equal; no values are equal to those that are all ``None``."""
    if not some or not others:
        return all(x is None for x in (*some, *others))
    return all(map(_is_same, some, others))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and torch.equal(one, other))
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and one == other)


def _are_zero(values: Values) -> bool:
    """Whether nothing is remembered, or only that positions are those of tokens."""
    return all(x is None or (isinstance(x, Tensor) and not bool(x.any())) for x in values)
