"""The model of a pool: its present state, and the origin of a cache that begins now."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import torch
from torch import Tensor

from kvloom.caches import CacheFormat
from kvloom.core.checks import INDEX_DTYPES, expect
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.attention.held import hold_attention, release_attention
from kvloom.integrations.transformers.cache.pairs import PairGuard
from kvloom.integrations.transformers.cache.trial import reads_padding_in_pieces
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.invariance import (
    Wish,
    hold_layers,
    release_layers,
    report_layers,
)
from kvloom.integrations.transformers.models.content import content_of, expect_content
from kvloom.integrations.transformers.models.encoders import content_of_rows, expect_contents
from kvloom.integrations.transformers.models.positions import gives_positions
from kvloom.integrations.transformers.models.remembered import memory_of
from kvloom.integrations.transformers.pool.configured import Configured
from kvloom.integrations.transformers.pool.encoder_runs import EncoderRuns
from kvloom.integrations.transformers.pool.hooks import watch_inputs
from kvloom.integrations.transformers.pool.origin import Origin
from kvloom.integrations.transformers.pool.padding import padding_of
from kvloom.paging import expect_salt

if TYPE_CHECKING:
    from kvloom.integrations.transformers.pool.identity import Identity
    from kvloom.integrations.transformers.pool.states import PoolStates

_PADDING: Final = "there is a padding token in the prompt, which the model reads otherwise in two pieces"
_KEPT: Final = 15
"""Number of last states whose fingerprints are kept."""


class PoolModel:
    """A model whose caches share pages.

    Attributes:
        guard: Refuses caches that the model would misread.
        watch: Watch of the model's state.
        states: Empty tensor with the model's dtype and device.
        has_encoder: Whether it is an encoder-decoder, whose tokens are the decoder's.
        memory: What it remembers of texts outside of their caches; ``None`` if nothing.

    Args:
        model: A ``PreTrainedModel``.
        wish: Changes of its layers, until ``release`` or until this object is collected.
        is_in_place: Whether it must attend in place until then, as where ``wish`` is of attention.
    """

    def __init__(self, model: Any, wish: Wish, is_in_place: bool = False) -> None:
        holder = f"pool {id(self)}"
        hold_layers(model, holder, wish)
        if is_in_place or wish.attention:
            hold_attention(model, holder)
        watch_inputs(model)
        self.guard = PairGuard(model)
        self.watch = ModelWatch(model)
        self._runs = EncoderRuns(self.watch) if model.config.is_encoder_decoder else None
        hook = None
        if self._runs is not None:
            hook = model.get_encoder().register_forward_hook(self._runs, with_kwargs=True)
        self.release = finalize(self, _release, model, holder, hook)
        self.states = torch.empty(0, dtype=model.dtype, device=model.device)
        self._configured = Configured(model)
        self.has_encoder = self._runs is not None
        self.memory = memory_of(model)
        self._gives_positions = None if self.has_encoder else gives_positions(model)
        self._identities: dict[str, Identity] = {}

    @property
    def placeholders(self) -> dict[int, str]:
        """Its tokens for pictures, audio and the like, with their names; none of an encoder."""
        return {} if self.has_encoder else self._configured.placeholders

    @property
    def counted(self) -> frozenset[int]:
        """Tokens of pictures by which the model remembers something; empty if it remembers nothing."""
        return frozenset() if self.memory is None else self.memory.pictures

    def rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[list[int]], list[int]]:
        """Tokens of each row, and the columns in which they begin; arguments are those of ``KVPool.begin``.

        Raises:
            ArgumentError: as ``KVPool.begin``.
            UnsupportedError: the same.
        """
        expect("input_ids", input_ids, "B T", dtype=INDEX_DTYPES)
        if not input_ids.numel():
            raise ArgumentError(f"input_ids must hold at least one token, got {list(input_ids.shape)}")
        begins, kind = padding_of(attention_mask, *input_ids.shape), type(self.watch.model)
        if any(begins) and "position_ids" not in signature(kind.forward).parameters:
            raise UnsupportedError(f"model must take position_ids for rows with padding, got {kind.__name__}")
        return [row[begin:] for row, begin in zip(input_ids.tolist(), begins, strict=True)], begins

    def content_of(self, inputs: Mapping[str, Any]) -> str | list[str]:
        """As ``KVPool.content_of``."""
        of_encoder = self._configured.placeholders
        return content_of_rows(inputs, of_encoder) if self.has_encoder else content_of(inputs)

    def origin(self, rows: Sequence[Sequence[int]], salt: str, content: str | Sequence[str] | None) -> Origin:
        """Origin of a cache that begins now; arguments are those of ``KVPool.begin``.

        Raises:
            ArgumentError: as ``KVPool.begin``.
            StateError, UnsupportedError: the model was changed, as ``Configured.follow``.
        """
        expect_salt(salt)
        state = self.watch.state()
        self._configured.follow(state)
        refusal, rope = "", self._configured.rope
        if self.has_encoder:
            contents = expect_contents(content, len(rows))
            refusal = _PADDING if reads_padding_in_pieces(self.watch.model, rows) else ""
        else:
            contents = expect_content(self.placeholders, rows, content)
        frequencies = "" if rope is None else rope.frequencies(max(map(len, rows)))
        if rope is not None and frequencies is None:
            refusal = rope.why_alone
        of_model = self.watch, self._configured, bool(self.placeholders), self.counted, self._runs
        own = *of_model, salt, list(contents), state, self._gives_positions, frequencies or "", refusal
        return Origin(*own)

    def identity(self, format: CacheFormat, states: "PoolStates | None" = None) -> "Identity":
        """Identity of the present state, computed once for each state.

        Args:
            format: Cache format of keys and values.
            states: Pages of recurrent states.

        Raises:
            UnsupportedError: weights are not in memory.
        """
        from kvloom.integrations.transformers.pool.identity import identify

        state = self.watch.state()
        if state not in self._identities:
            self._identities = dict([*self._identities.items()][-_KEPT:])
            self._identities[state] = identify(self.watch.model, format, states)
        return self._identities[state]

    def why_unidentified(self, state: str) -> str:
        """Why a store cannot be told of pages that were computed in a state; empty if it can."""
        is_present = state in self._identities or state == self.watch.state()
        return "" if is_present else "settings of torch, such as autocast, are others now: commit within them"

    def layers(self) -> dict[str, Any]:
        """Changes of the model's layers, as ``LayerReport.summary``."""
        return report_layers(self.watch.model).summary()

    def digest(self) -> str:
        """Digest of the present state, the same in every process.

        Raises:
            UnsupportedError: weights are not in memory.
        """
        from kvloom.integrations.transformers.pool.identity import model_digest

        return model_digest(self.watch.model)


def _release(model: Any, holder: str, hook: Any) -> None:
    if hook is not None:
        hook.remove()
    release_layers(model, holder)
    release_attention(model, holder)
