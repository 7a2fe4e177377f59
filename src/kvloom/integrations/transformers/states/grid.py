"""Grid of positions where texts are cut into pieces, so that recurrent states have the same bits each time.

The bits of a recurrent state depend on the pieces in which its text was fed. A model with such states is
therefore fed each text in pieces that end at multiples of the grid. A text that was fed otherwise, such as
token by token while it was generated, has no whole pieces from there on.

Shapes: B rows, T new tokens of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from kvloom.integrations.tensor_state import version_of
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENTS
from kvloom.integrations.transformers.models.content import is_no_input

_AXES: Final = {
    "input_ids": (-1, 2),
    "inputs_embeds": (1, 3),
    "attention_mask": (1, 2),
    "position_ids": (-1, 0),
    "cache_position": (-1, 1),
    "token_type_ids": (-1, 2),
    "mm_token_type_ids": (-1, 2),
}
"""Axis of the tokens, and number of axes (0 for any), of each argument with tokens."""
_WHOLE: Final = {
    "return_dict": False,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
}
"""Argument values with which the outputs of pieces cannot be joined."""
_OUTPUTS: Final = ("logits", "last_hidden_state")


class Grid:
    """State of a cache that is fed in pieces: the end of the whole pieces, and copies where pieces ended.

    Attributes:
        interval: Tokens between two multiples of the grid.
        end: Number of tokens that were fed in whole pieces.
        found: Number of tokens whose states were found, or committed last.
        wanted: Numbers of tokens at which to make copies, beside the last whole piece of each forward.
        copies: Copies of the cache by their number of tokens.
        outputs: Outputs of the first pieces of a forward whose last piece runs now.
        versions: Result of ``versions_of`` after the last forward; ``None`` if not known.
    """

    def __init__(self, interval: int, end: int = 0) -> None:
        self.interval = interval
        self.end = self.found = end
        self.wanted: set[int] = set()
        self.copies: dict[int, Any] = {}
        self.outputs: list[Any] = []
        self.versions: Any = None
        self._last: int | None = None

    def __copy__(self) -> "Grid":
        other = Grid(self.interval, self.end)
        other.found, other.wanted, other.copies = self.found, {*self.wanted}, {**self.copies}
        return other

    def cuts(self, past: int, end: int) -> list[int]:
        """Ends of the pieces of a forward of the tokens from ``past`` to ``end``, without the last end."""
        if past != self.end:
            return []
        return [*range(past + self.interval, end, self.interval)]

    @contextmanager
    def feeding(self, last: int) -> Iterator[None]:
        """Context in which the pieces of a forward up to token ``last`` are fed."""
        self._last = last
        try:
            yield
        finally:
            self._last = None

    def is_kept(self, past: int, end: int) -> bool:
        """Note that the tokens from ``past`` to ``end`` were fed; whether to ``keep`` a copy of the cache."""
        is_whole = past == self.end and end - past == self.interval
        if is_whole:
            self.end = end
        last = end if self._last is None else self._last
        if end + self.interval == last:  # the same text, whose last token is always computed, begins here
            self.wanted.add(end)
        return is_whole and (end in self.wanted or end + self.interval > last)

    def keep(self, end: int, copy: Any) -> None:
        """Keep a copy of the cache after ``end`` tokens, and drop copies that are not wanted."""
        self.copies = {at: x for at, x in self.copies.items() if at in self.wanted} | {end: copy}

    def truncate(self, end: int) -> None:
        """Forget all pieces after the first ``end`` tokens."""
        self.end = min(self.end, end // self.interval * self.interval)
        self.copies = {at: x for at, x in self.copies.items() if at <= end}


def versions_of(layers: Sequence[Any]) -> list[tuple[int, int]]:
    """Identity and version counter of each state tensor of the layers."""
    states = (
        x
        for layer in layers
        for kind in ("conv_states", "recurrent_states")
        for x in getattr(layer, kind, {}).values()
        if x is not None
    )
    return [(id(x), version_of(x)) for x in states]


def why_uncut(module: Any, inputs: Mapping[str, Any], num_tokens: int) -> str:
    """Name of an argument of a forward of ``num_tokens`` tokens that cannot be cut; empty if all can."""
    if inputs.get("return_dict") is None and not getattr(module.config, "return_dict", True):
        return "return_dict"
    for name, value in inputs.items():
        if is_no_input(value) or name in CACHE_ARGUMENTS:
            continue
        if isinstance(value, Tensor):
            axis, ndim = _AXES.get(name, (-1, 0))
            is_cut = name in _AXES and (name == "attention_mask" or value.shape[axis] == num_tokens)
            if not is_cut or value.ndim != (ndim or value.ndim):
                return name
        elif not isinstance(value, (bool, int, float, str)) or value == _WHOLE.get(name):
            return name
    return ""


def piece_of(inputs: Mapping[str, Any], start: int, end: int, num_tokens: int) -> dict[str, Any]:
    """Arguments of a forward cut to its new tokens ``start`` to ``end``, of ``num_tokens``."""
    piece = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and name == "attention_mask":  # with or without columns of stored tokens
            piece[name] = value[:, : value.shape[1] - num_tokens + end]
        elif isinstance(value, Tensor) and name in _AXES:
            piece[name] = value.narrow(_AXES[name][0], start, end - start)
    if keep := inputs.get("logits_to_keep"):
        piece["logits_to_keep"] = max(keep - (num_tokens - end), 1)
    return piece


def joined(outputs: list[Any], keep: int) -> Any:
    """The output of a forward, joined from the outputs of its pieces.

    Args:
        outputs: Outputs of all pieces.
        keep: ``logits_to_keep`` of the forward; 0 for all.
    """
    last = outputs[-1]
    for name in _OUTPUTS:
        found = [x for x in (getattr(x, name, None) for x in outputs) if isinstance(x, Tensor)]
        if len(found) == len(outputs):
            whole = torch.cat(found, 1)
            last[name] = whole[:, -keep:] if keep else whole
    return last
