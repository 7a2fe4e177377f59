"""Bytes of weights, cache, scales, page tables and waste, before anything is allocated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvloom.caches import CacheFormat, Sequences
from kvloom.core.entries import CODES, group_for
from kvloom.core.spelling import STORAGE, expect_pack
from kvloom.errors import ArgumentError, ConfigError
from kvloom.integrations.transformers.cache.encoder import format_beside
from kvloom.integrations.transformers.cache.formats import cache_format
from kvloom.integrations.transformers.models.positions import positions_of
from kvloom.planning.making import read_config
from kvloom.planning.model import Kind, LayerShape, ModelShape

_LONGEST: Final = 1 << 40
"""Maximum number of tokens, or sequences, of a search."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Bytes of one layer.

    Attributes:
        kind: ``"full"``, ``"window"``, ``"latent"`` (MLA), ``"hybrid"``, ``"recurrent"``, ``"none"``, or
            ``"encoder"`` for what a layer keeps of an encoder's tokens.
        cache: Bytes of keys and values, or of their codes.
        scales: Bytes of scales.
        states: Bytes of recurrent states, which transformers' own layers keep.
        waste: Bytes of ``cache`` and ``scales`` in slots without a token.
    """

    kind: Kind
    cache: int = 0
    scales: int = 0
    states: int = 0
    waste: int = 0

    @property
    def total(self) -> int:
        """Bytes allocated."""
        return self.cache + self.scales + self.states


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes of a model and its ``KVCache`` with ``batch`` sequences of ``context`` tokens each.

    With ``beams`` there are ``beams`` sequences for each of ``batch`` inputs. An encoder's keys and values
    are kept once for each input, for all of its beams.

    ``cache + scales`` is the maximum of ``KVCache.nbytes`` with ``max_tokens`` while ``context`` tokens are
    read, in forwards of any number of tokens; with ``at_once`` it is exactly ``nbytes`` after each prompt was
    read in one forward. A ``KVPool`` with as many token slots in whole pages takes the same bytes; ``tables``
    are the page tables that attention reads.

    Attributes:
        shape: Shape of the model.
        kv: Format string of keys and values.
        values: Format string of the values, if it differs; else ``None``.
        context: Tokens of each sequence.
        batch: Number of sequences, or of inputs with ``beams`` sequences each.
        page_size: Tokens in a page.
        layers: Bytes of each layer; those of an encoder's tokens follow, each a layer of its own.
        tables: Bytes of page tables, one table for all layers of a window.
        pack: As of ``enable``.
        at_once: As of ``plan``.
        encoder_tokens: Tokens of the encoder for each input; 0 without an encoder.
        beams: Number of sequences of each input.
    """

    shape: ModelShape
    kv: str
    values: str | None
    context: int
    batch: int
    page_size: int
    layers: tuple[LayerPlan, ...]
    tables: int
    pack: bool | str = False
    at_once: bool = False
    encoder_tokens: int = 0
    beams: int = 1

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return self.shape.weights

    @property
    def packed(self) -> int:
        """Maximum bytes of packed weights beside the others, if the processor can pack their dtype."""
        return self.shape.packable if self.pack is True else 0

    @property
    def cache(self) -> int:
        """Bytes of keys and values, or of their codes."""
        return sum(layer.cache for layer in self.layers)

    @property
    def scales(self) -> int:
        """Bytes of scales."""
        return sum(layer.scales for layer in self.layers)

    @property
    def states(self) -> int:
        """Bytes of recurrent states."""
        return sum(layer.states for layer in self.layers)

    @property
    def state_page(self) -> int:
        """Bytes of the recurrent states after one text in a ``KVPool``, as float32 in whole pages."""
        size = self.page_size
        return sum(-(-layer.state_numel // size) * size * 4 for layer in self.shape.layers)

    @property
    def state_tokens(self) -> int:
        """Number of tokens whose keys and values have at least as many bytes as ``state_page``."""
        format = self._format
        layers = [*enumerate(self.shape.layers)]
        nbytes = sum(format.of_layer(i).entry(x.entry).nbytes for i, x in layers if x.entry)
        nbytes += sum(x.index.nbytes for _, x in layers if x.index)
        return -(-self.state_page // max(nbytes, 1))

    @property
    def waste(self) -> int:
        """Bytes of slots without a token, which ``cache`` and ``scales`` include."""
        return sum(layer.waste for layer in self.layers)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.packed + self.cache + self.scales + self.states + self.tables

    def by_kind(self) -> dict[Kind, tuple[int, LayerPlan]]:
        """Number of layers of each kind, and the sum of their bytes."""
        found: dict[Kind, tuple[int, LayerPlan]] = {}
        for layer in self.layers:
            count, x = found.get(layer.kind, (0, LayerPlan(layer.kind)))
            found[layer.kind] = (
                count + 1,
                LayerPlan(
                    layer.kind,
                    x.cache + layer.cache,
                    x.scales + layer.scales,
                    x.states + layer.states,
                    x.waste + layer.waste,
                ),
            )
        return found

    def longest_context(self, memory: int) -> int | None:
        """Longest context of each of ``batch`` sequences up to which every length fits in ``memory`` bytes.

        0 if not even the weights fit; ``None`` if every length fits.
        """
        return _largest_that_fits(lambda n: self._with(n, self.batch).total <= memory)

    def largest_batch(self, memory: int) -> int | None:
        """Largest number of sequences of ``context`` tokens that fit in ``memory`` bytes.

        0 if not even the weights fit; ``None`` if every number fits.
        """
        return _largest_that_fits(lambda n: self._with(self.context, n).total <= memory)

    def _with(self, context: int, batch: int) -> "Plan":
        format, rows = self._format, batch * self.beams
        windows = dict.fromkeys(layer.window for layer in self.shape.layers if layer.entry or layer.index)
        held = {
            window: _pages_and_tokens(context, window, self.page_size, self.at_once) for window in windows
        }
        own = tuple(
            _layer_plan(
                layer, format.of_layer(i), rows, *held.get(layer.window, (0, 0)), context, self.at_once
            )
            for i, layer in enumerate(self.shape.layers)
        )
        beside, num_tokens = format_beside(format, range(len(own))), self.encoder_tokens
        num_pages = -(-num_tokens // beside.page_size)
        of_encoder = tuple(
            _layer_plan(
                LayerShape("encoder", entry, None, 0),
                beside.of_layer(i),
                batch,
                num_pages,
                num_tokens,
                0,
                True,
            )
            for i, entry in self.shape.encoder.items()
            if num_tokens
        )
        tables = 8 * (rows * sum(count for count, _ in held.values()) + batch * num_pages)
        return replace(self, context=context, batch=batch, layers=own + of_encoder, tables=tables)

    @property
    def _format(self) -> CacheFormat:
        """Format of the decoder's tokens."""
        return cache_format(self.shape.config, self.kv, self.page_size, values=self.values)


def plan(
    config: Any,
    kv: str = "auto",
    *,
    context: int | None = None,
    batch: int = 1,
    page_size: int = 16,
    values: str | None = None,
    pack: bool | str = False,
    at_once: bool = False,
    encoder_tokens: int | None = None,
    beams: int = 1,
    weights: int | None = None,
) -> Plan:
    """Compute the exact bytes of a model and its cache; needs no weights and allocates nothing.

    Args:
        config: A ``PretrainedConfig``, a ``config.json`` or GGUF, a folder with one, or a ``ModelShape``.
        kv: As of ``KVCache.for_model``.
        context: Tokens of each sequence; ``None`` for the model's maximum.
        batch: Number of sequences, or of inputs with ``beams`` sequences each.
        page_size: Tokens in a page.
        values: As ``kv``, only for the values.
        pack: As of ``enable``: ``True`` for packed weights of linear layers beside the others.
        at_once: Whether each prompt is read in one forward, and nothing after it. Otherwise windows and
            residual windows count twice: a forward needs those before it, and leaves those after it.
        encoder_tokens: For an encoder-decoder, the tokens that its encoder makes of each input, padding
            included; ``None`` for the maximum of the configuration, such as Whisper's 1,500. For a decoder to
            which the caller may give an encoder's output, the tokens of that output, or ``None``.
        beams: Sequences of each input, which share what the encoder made of it: ``num_beams`` times
            ``num_return_sequences`` of samples.
        weights: Bytes of the weights, as of a file with another quantization; ``None`` for those that the
            configuration says, or that a ``ModelShape`` has.

    Raises:
        ArgumentError: an argument has another value, or ``kv`` has a group that does not divide a head dim.
        UnsupportedError: as ``ModelShape.of``.
    """
    if isinstance(config, (str, Path)):
        config = read_config(config)
    shape = config if isinstance(config, ModelShape) else ModelShape.of(config, weights)
    if weights is not None:
        shape = replace(shape, weights=weights)
    if context is None:
        context = positions_of(shape.config)
        if context is None:
            raise ArgumentError(
                "context must be given if the configuration has no max_position_embeddings, got None"
            )
    encoder_tokens = _encoder_tokens(shape, encoder_tokens)
    for name, value, least in (
        ("context", context, 0),
        ("batch", batch, 1),
        ("page_size", page_size, 1),
        ("encoder_tokens", encoder_tokens, 1 if shape.encoder and shape.encoder_positions != 0 else 0),
        ("beams", beams, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(f"{name} must be an int of at least {least}, got {value!r}")
    expect_pack(pack)
    empty = Plan(shape, kv, values, context, batch, page_size, (), 0, pack, at_once, encoder_tokens, beams)
    try:
        return empty._with(context, batch)
    except ConfigError as error:
        raise ArgumentError(f"kv must fit every layer, got {kv!r}: {error}") from error


def _encoder_tokens(shape: ModelShape, given: int | None) -> int:
    """Tokens of the encoder for each input: those given, or the maximum of the configuration."""
    if not shape.encoder:
        if given is not None:
            raise ArgumentError(f"encoder_tokens must be None for a model without an encoder, got {given!r}")
        return 0
    if given is None:
        given = shape.encoder_positions
    if given is None:
        raise ArgumentError(
            "encoder_tokens must be given if the configuration does not say how many tokens the encoder "
            "makes of an input, got None"
        )
    return given


def kinds_for(shape: ModelShape) -> list[str]:
    """Every ``kv`` that a model can have; codes only if its head dims have a group."""
    entries = [*(layer.entry for layer in shape.layers if layer.entry), *shape.encoder.values()]
    dims = {side.head_dim for entry in entries for side in entry.sides}
    return [kind for kind in STORAGE if kind not in CODES or all(map(group_for, dims))]


def _pages_and_tokens(context: int, window: int | None, page_size: int, at_once: bool) -> tuple[int, int]:
    """Most pages of one sequence while ``context`` tokens are read, and the tokens that it then holds."""
    if window is None or not context:
        return -(-context // page_size), context
    return _in_window(Sequences(CacheFormat(page_size=page_size), window), context, at_once)


def _in_window(sequences: Sequences, context: int, at_once: bool) -> tuple[int, int]:
    """Pages and tokens as of ``_pages_and_tokens``, for empty sequences with a window."""
    sequences.reserve(1, context)
    num_pages, num_tokens = sequences.pages.pool.num_pages, sequences.tables[0].num_tokens
    if not at_once:
        num_pages = min(-(-context // sequences.format.page_size), sequences.most_pages)
    return num_pages, num_tokens


def _layer_plan(
    layer: LayerShape,
    format: CacheFormat,
    batch: int,
    num_pages: int,
    num_tokens: int,
    context: int,
    at_once: bool,
) -> LayerPlan:
    states = batch * layer.state_nbytes
    num_slots = batch * num_pages * format.page_size
    empty, of_index = num_slots - batch * num_tokens, layer.index.nbytes if layer.index else 0
    if layer.entry is None:
        return LayerPlan(layer.kind, of_index * num_slots, states=states, waste=of_index * empty)
    entry = format.entry(layer.entry)
    recent, residual = 0, Sequences(format, layer.window).of_residual()
    if residual is not None and num_tokens:
        newest = _in_window(residual, context, at_once)[0] * residual.format.page_size
        recent = batch * newest * layer.entry.nbytes
    scales = entry.nbytes_scales
    cache = (entry.nbytes - scales + of_index) * num_slots + recent
    return LayerPlan(layer.kind, cache, scales * num_slots, states, (entry.nbytes + of_index) * empty)


def _largest_that_fits(fits: Callable[[int], bool]) -> int | None:
    """Largest number that fits, if all smaller ones do."""
    low, high = 0, 1
    while high <= _LONGEST and fits(high):
        low, high = high, 2 * high
    if high > _LONGEST:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
