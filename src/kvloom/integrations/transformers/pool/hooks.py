"""Hooks by which caches of pools see the inputs of each forward, and feed it in pieces."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvloom.errors import ArgumentError
from kvloom.integrations.transformers.models.cache_argument import given_cache
from kvloom.integrations.transformers.models.encoders import PREFIX
from kvloom.integrations.transformers.models.signatures import parameters_of
from kvloom.integrations.transformers.pool.origin import (
    ASSIGNED,
    Origin,
    PoolCache,
    num_tokens_in,
    token_inputs,
)
from kvloom.integrations.transformers.states.grid import Grid, joined, piece_of, versions_of, why_uncut


def watch_inputs(model: nn.Module) -> None:
    """Register hooks by which caches of pools see the inputs of each forward; once for all pools."""
    for module in model.modules():
        takes_cache = module is model or isinstance(module, PreTrainedModel)
        if takes_cache and not any(isinstance(x, _BeforeForward) for x in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(_BeforeForward(), with_kwargs=True)
            module.register_forward_hook(_AfterForward(), with_kwargs=True, always_call=True)


class _BeforeForward:
    """Forward pre-hook that checks the inputs of a pool's cache, and feeds all pieces except the last."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inputs, cache = _inputs_of(module, args, kwargs)
        if cache is None or cache.origin is None:
            return None
        last, origin = None, cache.origin
        try:
            if not cache.is_assigned:
                past, tokens = int(cache.get_seq_length()), token_inputs(module, inputs)
                if origin.depth == 0:
                    origin = _repeat_rows(cache, tokens)
                    cache.before_forward(inputs)
                    if cache.has_encoder is not None and _are_given_again(origin, tokens):
                        last = inputs = _without_found(inputs, past)
                        tokens = token_inputs(module, inputs)
                cache.expect_in_place()
                origin.before_forward(module, tokens, past, cache.begins)
                if cache.grid is not None and origin.depth == 0:
                    if cache.grid.versions not in (None, versions_of(cache.layers)):
                        origin.refusal = ASSIGNED
                    last = _feed_pieces(module, inputs, origin, cache.grid, past)
        finally:
            origin.depth += 1
        return None if last is None else ((), last)


class _AfterForward:
    """Forward hook that notes the end of a forward, also by an error, and joins the outputs of its pieces."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs, cache = _inputs_of(module, args, kwargs)
        if cache is None or cache.origin is None:
            return None
        cache.origin.depth -= 1
        if output is not None and not cache.is_assigned:
            cache.origin.num_seen = end = int(cache.get_seq_length())
            if cache.origin.depth == 0:
                cache.origin.has_encoder = bool(cache.has_encoder)
                cache.origin.fed.add(token_inputs(module, inputs).get("input_ids"), end)
        if cache.grid is None or cache.origin.depth:
            return None
        outputs, cache.grid.outputs = cache.grid.outputs, []
        cache.grid.versions = versions_of(cache.layers)
        if output is None:  # it raised
            return None
        end = int(cache.get_seq_length())
        if cache.grid.is_kept(end - num_tokens_in(inputs), end):
            copy = cache.fork()
            copy.grid = None
            cache.grid.keep(end, copy)
        return joined([*outputs, output], inputs.get("logits_to_keep") or 0) if outputs else None


def _repeat_rows(cache: PoolCache, inputs: Mapping[str, Any]) -> Origin:
    """Give a cache as many rows as a forward has, as ``generate`` repeats prompts; returns its origin.

    Raises:
        ArgumentError: the rows are no multiple of the cache's.
    """
    origin, given = cache.origin, inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    assert origin is not None  # noqa: S101
    num_rows, is_chosen = origin.fed.num_rows, origin.fed.is_chosen
    if not isinstance(given, torch.Tensor) or len(given) == num_rows:
        return origin
    if len(given) % num_rows or not len(given):
        raise ArgumentError(
            f"input_ids must have the {num_rows} rows with which the cache began, or each repeated, got "
            f"{len(given)}"
        )
    if cache.num_rows or cache.has_encoder:
        cache.batch_repeat_interleave(len(given) // num_rows)
    else:
        cache.origin = origin.of_rows([i for i in range(num_rows) for _ in range(len(given) // num_rows)])
    assert cache.origin is not None  # noqa: S101
    cache.origin.fed.is_chosen = is_chosen
    return cache.origin


def _are_given_again(origin: Origin, tokens: Mapping[str, Any]) -> bool:
    """Whether a decoder is given tokens that were found, too.

    Raises:
        ArgumentError: it is given no tokens, which it would make of labels, or of those of the encoder; or as
            ``FedTokens.are_given_again``.
    """
    given = tokens.get("input_ids")
    if given is None and tokens.get("inputs_embeds") is None:
        raise ArgumentError(f"{PREFIX}input_ids must be given with a cache of a pool, got None")
    return origin.fed.are_given_again(given)


def _without_found(inputs: Mapping[str, Any], past: int) -> dict[str, Any]:
    """Inputs of a forward of an encoder-decoder without the tokens that were found.

    ``generate`` of transformers 5.24 gives all tokens to the decoder unless it has a mask for them.
    """
    count = inputs[f"{PREFIX}input_ids"].shape[1]
    kept = f"{PREFIX}attention_mask"
    return {
        name: x[..., past:] if name.startswith(PREFIX) and name != kept and _has_columns(x, count) else x
        for name, x in inputs.items()
    }


def _has_columns(x: Any, count: int) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim in (1, 2) and x.shape[-1] == count


def _feed_pieces(
    module: nn.Module, inputs: Mapping[str, Any], origin: Origin, grid: Grid, past: int
) -> dict[str, Any] | None:
    """Feed all pieces of a forward except the last, whose arguments it returns; ``None`` without cuts."""
    num_tokens = num_tokens_in(inputs)
    cuts = [end - past for end in grid.cuts(past, past + num_tokens)]
    if not cuts:
        return None
    if name := why_uncut(module, inputs, num_tokens):
        origin.refusal = (
            f"they were not fed in pieces of {grid.interval} tokens, into which {name} cannot be cut"
        )
        return None
    outputs = []
    with grid.feeding(past + num_tokens):
        for start, end in pairwise((0, *cuts)):
            outputs.append(module(**piece_of(inputs, start, end, num_tokens)))
    grid.outputs = outputs
    return piece_of(inputs, cuts[-1], num_tokens, num_tokens)


def _inputs_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Mapping[str, Any], PoolCache | None]:
    """Arguments of a forward by their names, and the cache among them if a pool began it.

    ``generate`` of transformers 4 gives the cache to an encoder, too, which leaves it alone.
    """
    if torch.compiler.is_compiling():
        return kwargs, None
    kind: Any = type(module)
    inputs = dict(zip(parameters_of(kind), args, strict=False)) | kwargs if args else kwargs
    cache = given_cache(inputs)
    return inputs, cache if isinstance(cache, PoolCache) and not cache.is_encoder(module) else None
