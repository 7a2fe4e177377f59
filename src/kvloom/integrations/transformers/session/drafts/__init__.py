"""Drafts: tokens that are guessed, and verified by the step that computes them."""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.fingerprint.per_state import once_per_state
from kvloom.integrations.transformers.invariance import BY_CUTS, Wish, report_layers
from kvloom.integrations.transformers.models.text_config import num_tokens_of
from kvloom.integrations.transformers.session.drafts.rows import why_rows_differ
from kvloom.integrations.transformers.session.requests.groups import stateful_layers_of
from kvloom.integrations.transformers.session.served import expect_served
from kvloom.ops.invariance import why_not_batch_invariant


def expect_drafts(
    model: Any, drafts: PreTrainedModel | str | None, wish: Wish, generation: Any = None
) -> None:
    """Raise unless sessions of a model may have drafts.

    Args:
        model: A model that sessions serve.
        drafts: Argument of ``continuous_batching``.
        wish: Changes of the model's layers during a session.
        generation: ``GenerationConfig`` of a session; ``None`` before there is one.

    Raises:
        ArgumentError: ``drafts`` has another value, or is a model with another number of tokens; or layers
            are not to be batch invariant.
        UnsupportedError: the model is not on a CPU, or its recurrent states depend on the number of requests
            that are computed together; or ``drafts`` is a model on another device, with recurrent states, or
            one that sessions do not serve; or a session has ``do_sample``.
    """
    if drafts is None:
        return
    if drafts != "lookup" and not isinstance(drafts, PreTrainedModel):
        got = type(drafts).__name__ if isinstance(drafts, torch.nn.Module) else repr(drafts)
        raise ArgumentError(f"drafts must be 'lookup', a PreTrainedModel or None, got {got}")
    if model.device.type != "cpu":
        raise UnsupportedError(f"drafts must be None but on a CPU, got a model on {model.device}")
    if not wish.batch_invariant:
        raise ArgumentError("batch_invariant must be True or None with drafts, got False")
    if stateful_layers_of(model) is not None and (why := once_per_state(model, why_rows_differ)):
        raise UnsupportedError(f"drafts must be None for {type(model).__name__}: {why}")
    if isinstance(drafts, PreTrainedModel):
        _expect_assistant(model, drafts)
    if generation is not None and generation.do_sample:
        raise UnsupportedError(
            "drafts must be None with do_sample, whose random numbers are those of all requests together"
        )


def _expect_assistant(model: Any, assistant: PreTrainedModel) -> None:
    """Raise unless a model may draft for another."""
    name = type(assistant).__name__
    if assistant.device.type != "cpu":
        raise UnsupportedError(f"drafts must be a model on a CPU, got {name} on {assistant.device}")
    tokens, own = num_tokens_of(model), num_tokens_of(assistant)
    if own != tokens:
        raise ArgumentError(
            f"drafts must be a model with the tokens of {type(model).__name__}, whose embedding has {tokens} "
            f"rows, got {name} with {own}"
        )
    try:
        if stateful_layers_of(assistant) is not None:
            raise UnsupportedError(f"{name} has recurrent states, which do not go back")
        expect_served(assistant)
    except UnsupportedError as error:
        raise UnsupportedError(f"drafts must be a model that may draft: {error}") from error


def expect_verifiable(manager: Any) -> None:
    """Raise UnsupportedError unless several tokens have the bits of one, in the model of a new session.

    The model is then as before the session.

    Args:
        manager: Its ``BatchingManager``.
    """
    model = manager.model
    exempt = why_not_batch_invariant(model.dtype)  # holds for steps of more tokens than drafts have
    reasons = report_layers(model).not_invariant
    allowed = (BY_CUTS,) if exempt is None else (BY_CUTS, exempt)  # a session cuts each text in its own way
    why = next((x for x in reasons if not x.startswith(allowed)), None)
    if why is not None:
        manager.release()
        model.set_attn_implementation(manager._original_attn_impl)
        raise UnsupportedError(
            f"drafts must be None for {type(model).__name__}, where several tokens may have other bits than "
            f"one: {why}"
        )
