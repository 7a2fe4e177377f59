"""Origin of the tokens in a pool's cache: the inputs beside tokens that decide who may find their pages."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from kvloom.caches.layers.paged import PagedLayer
from kvloom.caches.rows.pages import Pages
from kvloom.errors import ArgumentError, StateError, UnsupportedError
from kvloom.integrations.transformers.cache.kv_cache import KVCache
from kvloom.integrations.transformers.fingerprint.scopes import scope_of
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.content import input_beside_tokens, positions_are_default
from kvloom.integrations.transformers.models.encoders import PREFIX, of_decoder
from kvloom.integrations.transformers.models.signatures import parameters_of
from kvloom.integrations.transformers.pool.configured import Configured
from kvloom.integrations.transformers.pool.encoder_runs import EncoderRuns
from kvloom.integrations.transformers.pool.fed_tokens import FedTokens
from kvloom.integrations.transformers.pool.padding import expect_mask_of_padding
from kvloom.integrations.transformers.states.grid import Grid
from kvloom.paging import PageTable

_OF_LIBRARY: Final = "transformers.models."
"""Package of models that do not change themselves while they compute."""
_CHANGED: Final = "the model changed while they were computed"
_READ_CODES: Final = "after a removal tokens read codes where a residual window has unquantized ones"
IN_TRAINING: Final = "they were computed in training mode"
UNSEEN: Final = "the model did not compute them, or did so where no pool sees it, as when it is compiled"
_LOST: Final = "the last picture was removed, by which positions of all tokens of its forward were counted"
_CHOSEN: Final = "rows were chosen among others, and it is not known which tokens were computed in each"
ASSIGNED: Final = "keys, values or states were assigned, or changed in place"


@dataclass(eq=False)
class Origin:
    """Everything beside tokens that decides the keys and values of one cache.

    Args:
        _watch: Watch of the model.
        _configured: What is read of the model's configuration.
        _has_placeholders: Whether the model reads pictures, audio and the like.
        _counted: Placeholders of pictures on which positions of later tokens depend.

    Attributes:
        runs: Runs of the model's encoder, whose inputs are the contents, beside which there are only tokens;
            ``None`` without an encoder.
        salt: Salt with which the cache began.
        contents: Digest of the content of placeholder tokens in each row; empty for tokens alone.
        state: State of the model when the tokens were found or computed.
        gives_positions: Whether forwards must be given positions, as by ``generate``, since the model counts
            otherwise where none are given; false if they must be given none, ``None`` if either is the same.
        frequencies: Name of the RoPE frequencies of all its tokens.
        refusal: Why nobody may find its pages; empty if they may be found.
        num_found: Columns of the found tokens, padding in front of them included.
        num_seen: Columns that were found, or computed by the model in forwards that were seen.
        depth: Number of nested forwards that run.
        has_encoder: Whether the encoder's keys were found, or stored in a forward that was seen.
        num_shared: Number of pages of each row that are shared with a known text.
        fed: Tokens that were found and computed.
    """

    _watch: ModelWatch
    _configured: Configured
    _has_placeholders: bool
    _counted: frozenset[int]
    runs: EncoderRuns | None
    salt: str
    contents: list[str]
    state: str
    gives_positions: bool | None
    frequencies: str
    refusal: str
    num_found: int = 0
    num_seen: int = 0
    has_encoder: bool = False
    depth: int = 0
    _is_wrapped: bool = False  # whether the outermost forward may change the model, as of a PeftModel does

    def __post_init__(self) -> None:
        self.num_shared = [0] * len(self.contents)
        self.fed = FedTokens(torch.empty(len(self.contents), 0), 0)

    @property
    def is_of_encoder(self) -> bool:
        """Whether the model has an encoder."""
        return self.runs is not None

    def scopes(self) -> list[str]:
        """Scope of each row's pages in a pool."""
        return [scope_of(self.salt, x, self.frequencies, self.state) for x in self.contents]

    def stored_scopes(self) -> list[str]:
        """Scope of each row's pages in a store, without the state, which is in the fingerprint."""
        return [scope_of(self.salt, x, self.frequencies) for x in self.contents]

    def is_encoder(self, module: nn.Module) -> bool:
        """Whether a module is the encoder of the model."""
        model: Any = self._watch.model
        return module is model.get_encoder()

    def refuses(self) -> str:
        """Why nobody may find the pages now; empty if they may be found."""
        return self.refusal or ("" if self._watch.is_unchanged_since(self.state) else _CHANGED)

    def of_rows(self, rows: Sequence[int]) -> "Origin":
        """The origin of a cache of the selected rows."""
        other = copy.copy(self)
        other.contents = [self.contents[row] for row in rows]
        other.num_shared = [self.num_shared[row] for row in rows]
        other.fed = copy.copy(self.fed)
        other.fed.select(rows)
        return other

    def __copy__(self) -> "Origin":
        other = Origin.__new__(Origin)
        vars(other).update(vars(self))
        other.fed = copy.copy(self.fed)
        return other

    def before_forward(
        self, module: nn.Module, inputs: Mapping[str, Any], past: int, begins: Sequence[int]
    ) -> None:
        """Check the inputs of a forward and the state of the model.

        Args:
            module: The model, or a part of it that takes the cache.
            inputs: Arguments of its ``forward`` by their names, as of ``token_inputs``.
            past: Columns in the cache.
            begins: Column of the first token of each row.

        Raises:
            ArgumentError: an input changes keys and values, and no content was given; the mask does not match
                the padding; or the model is another one than the pool's.
            StateError: the model changed after tokens were found, or now keeps other tokens.
        """
        is_outermost, end = self.depth == 0, past + num_tokens_in(inputs)
        if not self._watch.has(module):
            raise ArgumentError(
                f"cache must be of a pool of this {type(module).__name__}, got one of another model's pool"
            )
        if is_outermost and past > min(begins, default=0) and inputs.get("position_ids") is None:
            self._expect_no_pictures(inputs.get("input_ids"))
        if is_outermost and any(begins):
            expect_mask_of_padding(inputs.get("attention_mask"), begins, end)
        if self.is_of_encoder or not all(self.contents):
            self._expect_tokens_alone(module, inputs, past, begins, is_outermost)
        if is_outermost:
            self._is_wrapped = not type(module).__module__.startswith(_OF_LIBRARY)
        elif not self._is_wrapped:
            return
        padding = min(begins, default=0)
        state = self._watch.quick_state()
        if state != self.state:
            if past <= padding and not self.has_encoder:
                self._configured.follow(state)
                self.state = state
            elif past <= max(self.num_found, padding):
                raise StateError(
                    f"the model must be unchanged since {past} tokens of the cache, or keys of its encoder, "
                    f"were found: begin again "
                    f"after a change of weights, adapters, hooks, attributes or settings of torch, and in "
                    f"the torch.autocast of its forwards"
                )
            else:
                self.refusal = _CHANGED
        if not is_outermost:
            return
        if module.training:
            self.refusal = IN_TRAINING
        if (rope := self._configured.rope) is not None:
            self._note_frequencies(past <= padding, rope.frequencies(end - padding))

    def _expect_no_pictures(self, input_ids: Any) -> None:
        """Raise ArgumentError if new tokens have pictures, whose positions depend on those before them."""
        if self._counted and isinstance(input_ids, Tensor):
            found = self._counted & set(input_ids.flatten().tolist())
            if found:
                raise ArgumentError(
                    f"position_ids must be given for pictures after the first tokens of a text, as generate "
                    f"makes them of the whole text, got none for token {min(found)}"
                )

    def _expect_tokens_alone(
        self,
        module: nn.Module,
        inputs: Mapping[str, Any],
        past: int,
        begins: Sequence[int],
        is_outermost: bool,
    ) -> None:
        if is_outermost:
            kind: Any = type(module)
            name = input_beside_tokens(inputs, past, begins, self._has_placeholders, parameters_of(kind))
            is_given = inputs.get("position_ids") is not None
            if name is None and self.gives_positions not in (None, is_given):
                raise ArgumentError(
                    f"position_ids must be {'left out' if is_given else 'given'}, as generate does, since "
                    f"{type(module).__name__} counts positions otherwise where none are given"
                )
        else:
            is_default = positions_are_default(inputs.get("position_ids"), past, begins)
            name = None if is_default else "position_ids"
        if name == "position_ids" and any(begins):
            raise ArgumentError(
                f"position_ids must count the tokens of each row after its padding, from 0 in columns "
                f"{list(begins)}, as generate makes them of the mask, got {inputs.get('position_ids')}"
            )
        if name == "position_ids" and past and isinstance(inputs.get(name), Tensor):
            first, last = int(inputs[name].min()), int(inputs[name].max())
            raise ArgumentError(
                f"position_ids must count on from the {past} tokens that the cache holds, or be declared as "
                f"content=content_of(inputs), got {first} to {last}: in prompt lookup and assisted decoding "
                f"generate feeds the whole text again, so give these an empty KVCache"
            )
        if name is not None and self.is_of_encoder:
            raise ArgumentError(
                f"{PREFIX}{name} must be left out, or change nothing, with a cache of a pool, whose pages "
                f"are found for other inputs of the decoder too: use a KVCache of its own"
            )
        if name is not None:
            raise ArgumentError(
                f"{name} must be left out, or change nothing, with a cache that a pool began by tokens "
                f"alone, whose pages are found for other inputs too: begin with "
                f"content=content_of(inputs), or use a KVCache of its own"
            )

    def _note_frequencies(self, is_empty: bool, frequencies: str | None) -> None:
        if is_empty and frequencies is not None:
            self.frequencies = frequencies
        elif frequencies != self.frequencies and self._configured.rope is not None:
            self.refusal = self._configured.rope.why_alone


class PoolCache(KVCache):
    """A ``KVCache`` that a ``KVPool`` began, with the origin of its tokens."""

    origin: Origin | None = None
    grid: Grid | None = None  # set for models with recurrent states

    @property
    def has_encoder(self) -> bool | None:
        """Whether it has the keys and values of an encoder; ``None`` if its model has no encoder."""
        return None

    @property
    def began(self) -> Origin:
        """Its origin; raises ``StateError`` if no pool began it."""
        if self.origin is None:
            raise StateError("this cache was reset or loaded, and belongs to no pool")
        return self.origin

    def is_of(self, pages: Sequence[Pages]) -> bool:
        """Whether the pool with these pages began the cache; also true if layers were assigned since."""
        own = [x.pages for x in self.sequences]
        return self.is_assigned or own == [*pages[: len(own)]]

    @property
    def begins(self) -> list[int]:
        """Column of the first token of each row; empty before there are rows."""
        return self.sequences[0].begins

    def begin_behind(
        self, tables: Sequence[Sequence[PageTable]], begins: Sequence[int], end: int, states: Tensor
    ) -> None:
        """Give layers the tokens of found pages; does nothing without tokens and padding.

        Args:
            tables: Page tables of each row, one for each group of layers.
            begins: Column of the first token of each row.
            end: Number of columns up to the end of the found tokens.
            states: Empty tensor with the dtype and device of keys.
        """
        if self.origin is not None:
            self.origin.num_seen = end
        if end == 0 and not any(begins):
            return
        for sequences, own in zip(self.sequences, zip(*tables, strict=True), strict=True):
            sequences.adopt(own, begins, end)
        for pages in self._cache.layers:
            if isinstance(pages, PagedLayer):
                pages.num_tokens = end
        for layer in self._own_layers:
            layer.lazy_initialization(states)
            layer.is_found = True

    def is_encoder(self, module: nn.Module) -> bool:
        """Whether a module is the encoder of its model."""
        return False

    def before_forward(self, inputs: Mapping[str, Any]) -> None:
        """Note the inputs of a forward that are not of tokens."""

    def needs_attention(self, grid: object) -> bool:
        """Whether the model must attend in place: for residual windows, where no ``grid`` cuts texts."""
        return grid is None and not all(x.is_required for x in self.sequences)

    def expect_in_place(self) -> None:
        """Raise UnsupportedError if there is a residual window, and attention reads gathered tensors.

        All queries of a forward read the same tensors. What one of them reads unquantized would then depend
        on the forwards that its text was cut into, and so on whether a prefix was found. Pieces of a grid
        are the same in both.
        """
        if not self.needs_attention(self.grid):
            return
        for layer in self._own_layers:
            if not layer.is_in_place:
                raise UnsupportedError(
                    f"model must have kvloom's attention, as enable(model) sets it, in a pool whose kv has a "
                    f"residual window, or kv must be without one, as 'int4,recent=0': with "
                    f"{layer.attn_implementation!r} what a token reads unquantized depends on whether the "
                    f"tokens before it were found"
                )

    def refuses(self) -> str:
        """Why its pages cannot be shared; empty if they can."""
        if self.is_assigned:
            return ASSIGNED
        if any(not row.is_exact for x in self.sequences for row in x.rows):
            return _READ_CODES
        if self.origin is not None and self.get_seq_length() > self.origin.num_seen:
            return UNSEEN
        if self.origin is None:
            return ""
        fed = self.origin.fed
        return self.origin.refuses() or (_CHOSEN if fed.is_chosen and not fed.is_known else "")

    @property
    def is_assigned(self) -> bool:
        """Whether keys or values of a layer were assigned; such pages are not shared."""
        return any(any(layer.num_assigned) for layer in self._own_layers)

    def __getstate__(self) -> dict[str, Any]:
        """State for saving, without the origin: a loaded cache no longer belongs to the pool."""
        return {name: value for name, value in vars(self).items() if name != "origin"}

    def fork(self) -> "PoolCache":
        """Fork as ``KVCache`` does, with the origin and the grid."""
        fork = super().fork()
        fork.origin, fork.grid = copy.copy(self.origin), copy.copy(self.grid)
        return fork

    def reset(self) -> None:
        """Forget all tokens; the cache then no longer belongs to the pool."""
        super().reset()
        self.origin = self.grid = None

    def crop(self, tokens_to_remove: int | Tensor | Sequence[int]) -> None:
        """Crop as ``KVCache`` does, and forget pieces of the grid after the end."""
        super().crop(tokens_to_remove)
        if self.origin is not None:
            self.origin.fed.is_known &= isinstance(tokens_to_remove, int)  # else columns move apart
            self.origin.num_seen = min(self.origin.num_seen, int(self.get_seq_length()))
            self.origin.fed.truncate(self.origin.num_seen)
            self.origin.refusal = self.origin.refusal or (_LOST if self.remembered.is_lost else "")
        if self.grid is not None:
            self.grid.versions = None
            self.grid.truncate(int(self.get_seq_length()))

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        if self.origin is not None:
            self.origin = self.origin.of_rows(rows)
        if self.grid is not None:
            copies = {end: copy.fork() for end, copy in self.grid.copies.items()}
            for other in copies.values():
                other._select(rows)
            self.grid.copies, self.grid.versions = copies, None


def token_inputs(module: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs of a forward beside those of an encoder, by the names that they have in a decoder alone."""
    kind: Any = type(module)
    name = f"{PREFIX}input_ids"  # that of a wrapper's forward may be among **kwargs
    return of_decoder(inputs) if name in inputs or name in parameters_of(kind) else inputs


def num_tokens_in(inputs: Mapping[str, Any]) -> int:
    """Number of new tokens of a forward."""
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    return given.shape[1] if isinstance(given, Tensor) else 0
