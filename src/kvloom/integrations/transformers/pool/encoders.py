"""Keys and values of encoders in a pool, found by what the encoder read.

Shapes: B rows, R stored rows, N tokens of an encoder.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn

from kvloom.caches import CacheFormat
from kvloom.caches.prefixes.group import PrefixGroup
from kvloom.caches.prefixes.search import Prefixes
from kvloom.caches.rows.pages import Pages
from kvloom.core.checks import expect_range
from kvloom.core.newest import keep_newest
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.tensor_state import version_of
from kvloom.integrations.transformers.cache.encoder import EncoderKVCache
from kvloom.integrations.transformers.cache.encoder_decoder import EncoderDecoderKVCache
from kvloom.integrations.transformers.cache.encoder_input import EncoderInput
from kvloom.integrations.transformers.cache.trial import reads_encoder_again
from kvloom.integrations.transformers.models.encoders import (
    MASK,
    are_others,
    contents_of_given,
    has_other_mask,
    main_input,
    undeclared,
)
from kvloom.integrations.transformers.models.found_states import EncoderOutputs
from kvloom.integrations.transformers.pool.encoder_runs import EncoderRuns
from kvloom.integrations.transformers.pool.model import PoolModel
from kvloom.integrations.transformers.pool.origin import IN_TRAINING, UNSEEN, PoolCache
from kvloom.paging import PageTable, uninterrupted, whole

_MOST: Final = 4096
"""Number of last inputs of encoders that are known."""
_OTHER_STATE: Final = (
    "the encoder ran in another state of the model, in training mode, or where no pool sees it"
)


class EncoderDecoderPoolCache(PoolCache, EncoderDecoderKVCache):
    """A ``PoolCache`` with both halves, whose keys and values of the encoder may have been found.

    Attributes:
        outputs: What is kept of the encoder's outputs of each row; empty if that is not known.
    """

    outputs: Sequence[EncoderOutputs] = ()
    _mask: tuple[ref[Tensor], int, list[str]] | None = None  # the last one that was checked

    @property
    def has_encoder(self) -> bool:
        """Whether it has the keys and values of an encoder."""
        return self.cross_attention_cache.num_rows > 0

    @property
    def is_assigned(self) -> bool:
        """Whether keys or values of a layer of either half were assigned."""
        return super().is_assigned or any(any(x.num_assigned) for x in self.cross_attention_cache.layers)

    def is_encoder(self, module: nn.Module) -> bool:
        """Whether a module is the encoder of the model, if the cache belongs to a pool."""
        return self.origin is not None and self.origin.is_encoder(module)

    def before_forward(self, inputs: Mapping[str, Any]) -> None:
        """Check that the encoder reads the content of the cache, and note what it returned.

        Raises:
            ArgumentError: an input is not of the content.
        """
        origin, outputs = self.began, inputs.get("encoder_outputs")
        contents, runs = origin.contents, cast(EncoderRuns, origin.runs)
        name = next(undeclared(inputs, contents), "")
        if not name and not self._is_of_content(inputs.get(MASK)):
            name = MASK
        seen = [] if self.has_encoder or outputs is None else runs.of_outputs(outputs)
        given = [run.content if run else "" for run in seen]
        if outputs is None:
            given = contents_of_given(inputs, len(contents))
        if not name and are_others(given, contents):
            name = main_input(inputs)
        if name:
            raise ArgumentError(
                f"{name} must be among the inputs of pool.content_of(inputs) with which the cache began, got "
                f"another that the encoder reads, or one of another dtype"
            )
        if self.has_encoder:
            if not origin.has_encoder:
                origin.refusal = UNSEEN
            return
        self.outputs = EncoderOutputs.of_rows(outputs)
        if outputs is not None and not (seen and all(map(runs.is_present, seen))):
            origin.refusal = _OTHER_STATE
        elif outputs is None and runs.is_training():
            origin.refusal = IN_TRAINING

    def _is_of_content(self, mask: Any) -> bool:
        """Whether the mask of a forward is that of the content; of the same tensor it is asked once."""
        contents = self.began.contents
        if isinstance(mask, Tensor) and self._mask is not None:
            known, version, said = self._mask
            if known() is mask and version == version_of(mask) and said == contents:
                return True
        if has_other_mask(mask, contents):
            return False
        self._mask = (ref(mask), version_of(mask), contents) if isinstance(mask, Tensor) else None
        return True

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_mask": None}

    def skip_encoder(self) -> dict[str, Any]:
        """Arguments of ``generate`` by which the encoder does not run, if its keys and values were found.

        They say shapes and masks of what the encoder would return, and raise where a model reads more::

            model.generate(**inputs, **cache.skip_encoder(), past_key_values=cache)

        Returns:
            ``encoder_outputs`` for the rows of the cache; nothing if the encoder must run.
        """
        found = self.cross_attention_cache.input.found
        if found is None or not self.outputs or not self.has_encoder:
            return {}
        device = self.cross_attention_cache.layers[0].device
        return {"encoder_outputs": EncoderOutputs.joined(self.outputs, device, found)}

    def fork(self) -> "EncoderDecoderPoolCache":
        """Fork as both of its classes do."""
        fork: EncoderDecoderPoolCache = super().fork()
        fork.outputs = self.outputs
        return fork

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        self.outputs = [self.outputs[row] for row in rows] if self.outputs else ()


class _Known(NamedTuple):
    """What is known of an encoder's input, beside its keys and values.

    Attributes:
        where: Scope in which its pages are found. That of another input with the same keys and values, if a
            cache had them in one stored row.
        num_tokens: N.
        dtype: Dtype in which attention reads them.
        input: Two numbers of it, by which another one is refused.
        outputs: What is kept of the encoder's outputs; ``None`` if they were not seen.
    """

    where: str
    num_tokens: int
    dtype: torch.dtype
    input: EncoderInput
    outputs: EncoderOutputs | None


class PoolEncoders:
    """Keys and values of encoders that the caches of one pool share, found in whole or not at all.

    Args:
        empty: An empty cache in pages that are kept.
    """

    def __init__(self, empty: EncoderKVCache) -> None:
        [sequences] = empty.sequences
        self._prefixes = Prefixes([PrefixGroup(sequences.pages)])
        self._known: dict[str, _Known] = {}
        self.num_asked = self.num_found = 0

    @property
    def pages(self) -> Pages:
        """The pages."""
        return self._prefixes.main.pages

    def begin(self, cache: EncoderDecoderPoolCache, model: PoolModel) -> None:
        """Give an empty cache the keys and values of its rows' encoders, if all of them are known.

        Args:
            cache: The cache, with its origin.
            model: The model.
        """
        scopes = cache.began.scopes()
        self.num_asked += len(scopes)
        rows = [x for x in map(self._found, scopes) if x is not None]
        if len(rows) < len(scopes) or len({(x.num_tokens, x.dtype) for x in rows}) > 1:
            return
        stored = [*dict.fromkeys((x.where, x.num_tokens) for x in rows)]
        with uninterrupted():
            tables, encoder = [self._hold(*x) for x in stored], cache.cross_attention_cache
            sources = [stored.index((x.where, x.num_tokens)) for x in rows]
            encoder.adopt(tables, sources, rows[0].num_tokens, model.states.to(rows[0].dtype))
            encoder.input = EncoderInput.joined([x.input for x in rows])
            encoder.input.found = object()
            outputs = [x.outputs for x in rows if x.outputs is not None]
            if len(outputs) == len(rows) and not reads_encoder_again(model.watch.model):
                cache.outputs = outputs
            cache.is_updated = dict.fromkeys(range(len(cache.layers)), True)
            cache.began.has_encoder = True
        self.num_found += len(rows)

    @whole
    def commit(self, cache: EncoderDecoderPoolCache) -> None:
        """Let others find the keys and values of the encoders of a cache.

        Raises:
            StateError: as ``Sequences.commit``.
        """
        if not cache.began.has_encoder:
            return
        encoder, scopes, tree = cache.cross_attention_cache, cache.began.scopes(), self._prefixes.main.tree
        [sequences] = encoder.sequences
        num_tokens, sources = int(encoder.get_seq_length()), encoder.sources
        places = [
            self._sealed_as(table) or scopes[row]
            for table, row in zip(sequences.tables, sources.firsts, strict=True)
        ]
        sequences.commit(tree, [self._ids(num_tokens)] * len(places), places)
        for row, (scope, stored) in enumerate(zip(scopes, sources.rows, strict=True)):
            outputs, known = cache.outputs[row] if cache.outputs else None, self._known.get(scope)
            if known is None or (known.where, known.num_tokens) != (places[stored], num_tokens):
                dtype = encoder.layers[0].dtype
                known = _Known(places[stored], num_tokens, dtype, encoder.input.row(row), outputs)
            keep_newest(self._known, scope, known._replace(outputs=known.outputs or outputs), _MOST)

    def saved(self, rename: Callable[[str], str | None] | None) -> tuple[Any, ...]:
        """State for saving; arguments are those of ``Prefixes.saved``."""
        rename = rename or str
        named = [(rename(scope), rename(x.where), x) for scope, x in self._known.items()]
        known = {scope: x._replace(where=where) for scope, where, x in named if scope is not None and where}
        return self._prefixes.saved(rename), known

    def load(self, saved: tuple[Any, ...]) -> None:
        """Add what was saved to empty pages."""
        prefixes, self._known = saved
        self._prefixes.load(prefixes)

    def check(self) -> None:
        """Check the invariants of the pages; raises ``StateError`` at the first that fails."""
        self._prefixes.check()

    def report(self) -> dict[str, int]:
        """Numbers of pages by state, and of rows whose encoder ``begin`` looked for and found."""
        return {**self.pages.pool.report(), "rows_asked": self.num_asked, "rows_found": self.num_found}

    def _found(self, scope: str) -> _Known | None:
        """What is known of an input, if all of its pages are found."""
        known = self._known.get(scope)
        if known is None:
            return None
        ids = self._ids(known.num_tokens)
        if self._prefixes.num_known(ids, known.where) * self._prefixes.page_size == len(ids):
            return known
        del self._known[scope]
        return None

    def _ids(self, num_tokens: int) -> list[int]:
        """Tokens under which the pages are in the tree: N, for each slot."""
        return [num_tokens] * (num_tokens + -num_tokens % self._prefixes.page_size)

    def _sealed_as(self, table: PageTable) -> str:
        """Scope in which pages are found already; empty if they are not.

        Rows of two inputs with the same keys share a stored row, which is found by the first one.
        """
        first, tree = table.pages[0], self._prefixes.main.tree
        return tree.text_of(first)[0] if self.pages.pool.is_sealed(first) else ""

    def _hold(self, where: str, num_tokens: int) -> PageTable:
        """A table of the pages of a known input."""
        found = self._prefixes.find(self._ids(num_tokens), where)
        held = self._prefixes.retain(found, self._prefixes.num_whole(found))
        [table] = self._prefixes.hold(found, num_tokens, held, 0)
        return table


def encoder_for(
    model: Any, layers: Sequence[Any], format: CacheFormat, max_tokens: int | None, *, has_store: bool
) -> EncoderKVCache | None:
    """An empty cache of the keys of a model's encoder, in pages that are kept; ``None`` without an encoder.

    Args:
        model: A ``PreTrainedModel``.
        layers: Layers of an empty cache of its decoder.
        format: Cache format of the decoder's tokens.
        max_tokens: Token slots of each layer; ``None`` for as many as of the decoder.
        has_store: Whether the pool has a store.

    Raises:
        ArgumentError: ``max_encoder_tokens`` is no positive number, or given without an encoder.
        UnsupportedError: there are an encoder and a store.
    """
    name = type(model).__name__
    if not model.config.is_encoder_decoder:
        if max_tokens is not None:
            raise ArgumentError(
                f"max_encoder_tokens must be None for {name}, which has no encoder, got {max_tokens}"
            )
        return None
    if has_store:
        raise UnsupportedError(f"store must be None for {name}, as the keys of an encoder are in no store")
    if max_tokens is not None:
        expect_range("max_encoder_tokens", max_tokens, 1)
    most = format.max_tokens if max_tokens is None else max_tokens
    return EncoderKVCache.beside(layers[0]._config, format, range(len(layers)), most)
