"""A layer of fixed storage for attention with a window: decode steps are one graph, however long the text.

Letters: B sequences, H key/value heads, Q new tokens of each, C columns of storage.
"""

import torch
from torch import Tensor

from kvloom.caches.layers import Form, expect_config
from kvloom.caches.memory import outside_inference_mode
from kvloom.caches.static import StaticLayer
from kvloom.errors import StateError


class StaticSlidingWindowLayer(StaticLayer):
    """The tokens that later ones can see, when each sees ``window`` tokens, itself included.

    Storage has ``window - 1 + rollback`` columns (at least one), from which the oldest are shifted out when
    new ones come. ``update`` returns new tensors of ``window - 1 + Q`` columns; those behind the new tokens
    are 0, as long as the text is shorter than the window, and must be hidden by the mask, as by any causal
    one.

    Args:
        window: Tokens that a token sees, itself included.
        rollback: How many of the last tokens ``crop`` can remove, as those of a rejected draft.
    """

    is_sliding = True

    def __init__(self, window: int, rollback: int = 0) -> None:
        self.window = expect_config("window", window, 1)
        super().__init__(max(window - 1 + expect_config("rollback", rollback, 0), 1))
        with outside_inference_mode():
            self._first = torch.zeros((), dtype=torch.int64)  # position of the first column

    @property
    def num_held(self) -> int:
        """Tokens in the first columns of the storage; reads tensors."""
        return int(self._length - self._first)

    @property
    def _length_given(self) -> tuple[str, int]:
        return "window", self.window

    def get_seq_length(self) -> Tensor:
        """Tokens seen, more than are held, a new 0-d int64 tensor."""
        return self._length.clone()

    def get_max_length(self) -> int:
        """The window."""
        return self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, Tensor]:
        """``(window - 1 + Q, max(seen - window + 1, 0))``, the second a 0-d int64 tensor."""
        return self.window - 1 + query_length, self._visible()

    def expect_croppable(self, num_tokens: int) -> int:
        """As for any layer, but what the next token sees must still be held."""
        kept, first = super().expect_croppable(num_tokens), int(self._first)
        if max(kept - self.window + 1, 0) < min(kept, first):
            raise StateError(
                f"num_tokens must keep at least {first + self.window - 1} tokens or none, got {num_tokens}: "
                f"of {int(self._length)} tokens the first {first} are gone"
            )
        return kept

    def _reset(self) -> None:
        super()._reset()
        self._first.zero_()

    def _visible(self) -> Tensor:
        """Position of the first token that the next one sees."""
        return (self._length - self.window + 1).clamp(min=0)

    def _append(self, key: Tensor, value: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        if self._tensors is None:
            self._allocate(form.batch, form.heads, form.key_dim, form.value_dim, form.dtype, form.device)
        num_new, where = key.shape[2], key.device
        position = self._length - self._first + torch.arange(num_new, device=where)
        columns = [
            torch.cat([old, torch.zeros_like(new)], 2).index_copy_(2, position, new)
            for old, new in zip(self._stored(), (key, value), strict=True)
        ]
        # All is made before anything changes.
        first = torch.maximum(self._first, self._length + num_new - self.max_length)
        left = torch.arange(self.max_length, device=where) + (first - self._first)
        kept = [x.index_select(2, left) for x in columns]
        seen = torch.arange(self.window - 1 + num_new, device=where) + (self._visible() - self._first)
        keys, values = (x.index_select(2, seen) for x in columns)
        for target, new in zip(self._stored(), kept, strict=True):
            target.copy_(new)
        self._first.copy_(first)
        self._length.add_(num_new)
        return keys, values

    def _truncate(self, num_tokens: int) -> None:
        self._first.clamp_(max=num_tokens)
        for x in self._tensors or ():
            x[:, :, num_tokens - int(self._first) :] = 0
        self._length.fill_(num_tokens)

    def _allocate(self, *args: object) -> None:
        super()._allocate(*args)  # type: ignore[arg-type]
        self._first = self._first.to(self._length.device)
