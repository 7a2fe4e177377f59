"""Check that a session computes the logits of its model, with a few short requests.

transformers cannot tell which families its continuous batching supports. Some have attention of their own
that ignores the session's, others need a mask that a session does not have.

Shapes: K rows of logits of a request, V tokens of the vocabulary.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from kvloom.errors import StateError, UnsupportedError
from kvloom.integrations.transformers.fingerprint.context import float32_precision
from kvloom.integrations.transformers.models.bit_plan import config_digest
from kvloom.integrations.transformers.models.layer_specs import layers_of
from kvloom.integrations.transformers.models.loading import summary_of
from kvloom.integrations.transformers.models.rope import dynamic_rope
from kvloom.integrations.transformers.models.text_config import text_config_of, token_ids_in
from kvloom.integrations.transformers.models.trials import undisturbed
from kvloom.integrations.transformers.session.attention import IMPLEMENTATION
from kvloom.integrations.transformers.session.manager import BatchingManager

_LOG: Final = logging.getLogger("kvloom")
_LENGTHS: Final = (40, 23, 5)
"""Lengths of the prompts. A step has room for three quarters of the first, which is read in two pieces."""
_LONGEST: Final = 256
"""Largest length of the first prompt, which is made longer than a window if it fits."""
_NEW: Final = 2
"""Number of new tokens of each request: one after its prompt, and one after a decode step."""
_ROUNDINGS: Final = 8
"""Allowed multiple of the change by one rounding of the embeddings. In float32, float16 and bfloat16, 80
families and models of 80 layers that sessions support differ by twice it at most, others by 25 times."""
_ONE: Final = GenerationConfig(
    max_new_tokens=1,
    do_sample=False,
    num_beams=1,
    use_cache=False,
    pad_token_id=0,
    output_logits=True,
    return_dict_in_generate=True,
)
"""What ``_alone`` asks of ``generate``."""
_served: set[tuple[Any, ...]] = set()


def expect_same_logits(model: PreTrainedModel) -> None:
    """Raise unless a session of a model computes the logits of ``generate``; once for each configuration.

    The distance of two rows of logits is the norm of their difference divided by the norm of the row of the
    plain forward. The median over requests is taken, after prompts and after a decode step, since rounding
    may choose another expert for one token. Allowed is the root of the dtype's epsilon, which keeps half of
    the digits. For models that amplify rounding, allowed is 8 times the distance to a plain forward with
    embeddings that are changed by one rounding.

    The model is unchanged afterwards. A model without weights, or one that a session holds, is not checked.

    Args:
        model: A model whose configuration a session accepts.

    Raises:
        UnsupportedError: a session fails, or computes other logits.
    """
    config, name = text_config_of(model), type(model).__name__
    key = (type(model), config_digest(config), model.dtype, model.device.type)
    if key in _served or config._attn_implementation == IMPLEMENTATION:
        return
    if any(x.device.type == "meta" for x in model.parameters()):
        _LOG.info("sessions of %s are not checked: it has no weights", name)
        return
    # Sessions compute in a thread of their own, without the caller's autocast.
    with torch.autocast(model.device.type, enabled=False), undisturbed(model), _own_attention(model):
        prompts = _prompts(model)
        try:
            texts, found = _in_session(model, prompts)
        except Exception as error:
            _expect_forward(model, prompts[-1], error)
            is_apart = isinstance(error, StateError)  # raised by attention without a session's cache
            why = "its layers hand no cache on to attention" if is_apart else summary_of(error)
            raise UnsupportedError(
                f"model must compute a step of continuous batching, which {name} does not: {why}"
            ) from error
        model.set_attn_implementation("eager")
        plain = [_alone(model, text) for text in texts]
        if not all(_is_defined(rows) for rows in plain):
            _LOG.info("sessions of %s are not checked: its logits are not finite", name)
            return
        measured, allowed = distance_of(found, plain), _epsilon(model.dtype, model.device) ** 0.5
        if not measured <= allowed:
            with _changed_embeddings(model):
                changed = [_alone(model, text) for text in texts]
            allowed = max(allowed, _ROUNDINGS * distance_of(changed, plain))
        if not measured <= allowed:  # also true if it is NaN
            raise UnsupportedError(
                f"model must have the same logits in continuous batching as in a plain forward, got {name} "
                f"whose logits differ by {measured:.1e} of their norm, where {allowed:.1e} is allowed"
            )
    _served.add(key)


def _prompts(model: Any) -> list[list[int]]:
    """Prompts without special tokens, such as padding or placeholders of pictures."""
    config, rope = text_config_of(model), dynamic_rope(model)
    window = max((x.window for x in layers_of(model) if x.tokens and x.window), default=0)
    lengths = (max(_LENGTHS[0], min(window + 16, _LONGEST)), *_LENGTHS[1:])
    ends = (rope and rope.limit, getattr(config, "max_position_embeddings", None))
    most = min([n - _NEW for n in ends if isinstance(n, int) and n > _NEW], default=_LONGEST)
    named = (x for name, x in config.to_dict().items() if name.endswith("token_id"))
    meant = {x for value in named for x in token_ids_in(value)}
    begin, size = config.vocab_size // 2, config.vocab_size
    words = (x % size for x in range(begin, begin + size) if x % size not in meant)
    each = cycle([*islice(words, _LONGEST)] or [0])
    return [list(islice(each, min(length, most))) for length in lengths]


def _in_session(model: Any, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[Tensor]]:
    """Run a session; returns each prompt with the new tokens that were fed back, and its logits."""
    manager = BatchingManager(
        model,
        GenerationConfig(max_new_tokens=_NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(
            page_size=16, num_blocks=3 * _LONGEST // 16, max_batch_tokens=max(3 * len(prompts[0]) // 4, 3)
        ),
        share=False,
    )
    processor = manager.batch_processor = manager._create_batch_processor()
    names = [manager.add_request(prompt) for prompt in prompts]
    rows: dict[Any, list[Tensor]] = {name: [] for name in names}
    seen: list[Tensor] = []

    def keep(_module: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits = output.logits[0]
        seen.append(logits if "logits_to_keep" in kwargs else logits[kwargs["logits_indices"]])

    hook = model.register_forward_hook(keep, with_kwargs=True)
    try:
        while processor.prepare_next_batch():
            requests = processor.inputs_and_outputs.requests_in_batch
            ready = [x.state.request_id for x in requests if x.has_new_token]
            manager._generation_step()
            for name, row in zip(ready, seen.pop(), strict=False):
                rows[name].append(row)
            processor.update_batch()
    finally:
        hook.remove()
    outputs = manager.output_router.output_queue
    done = {output.request_id: output for output in (outputs.get() for _ in range(outputs.qsize()))}
    failed = [output.error for output in done.values() if output.error]
    if failed:
        raise UnsupportedError(failed[0])
    texts = [prompt + done[name].generated_tokens[:-1] for name, prompt in zip(names, prompts, strict=True)]
    return texts, [torch.stack(rows[name]) for name in names]


def _alone(model: Any, text: Sequence[int]) -> Tensor:
    """Logits ``[K, V]`` of ``generate``, after the prompt of a text and after all of it.

    It alone knows what a model is given beside tokens: some models count positions themselves, not from 0.
    """
    rows = []
    for end in range(len(text) - _NEW + 1, len(text) + 1):
        ids = torch.tensor([text[:end]], device=model.device)
        made = model.generate(ids, _ONE, attention_mask=torch.ones_like(ids))
        rows.append(made.logits[0][0])
    return torch.stack(rows)


def _expect_forward(model: Any, text: Sequence[int], error: Exception) -> None:
    """Raise UnsupportedError if ``generate`` fails with a text, too."""
    try:
        model.set_attn_implementation("eager")
        _alone(model, text)
    except Exception as plain:
        raise UnsupportedError(
            f"model must compute a plain forward of a text, which {type(model).__name__} does not: "
            f"{summary_of(plain)}"
        ) from error


def _is_defined(logits: Tensor) -> bool:
    """Whether no logit is NaN or positive infinity; -infinity marks tokens that a model never generates."""
    return not bool((logits.isnan() | logits.isposinf()).any())


def distance_of(found: Sequence[Tensor], plain: Sequence[Tensor]) -> float:
    """Largest, over k, of the median distance of the k-th rows of all requests."""
    distances = []
    for one, other in zip(found, plain, strict=True):
        is_said = (other > -1e9).all(0)
        one, other = (x[:, is_said].double() for x in (one, other))
        one, other = (x - x.mean(-1, keepdim=True) for x in (one, other))
        distances.append(((one - other).norm(dim=-1) / other.norm(dim=-1).clamp(min=1e-30)).tolist())
    return float(max(median(rows) for rows in zip(*distances, strict=True)))


def _epsilon(dtype: torch.dtype, device: torch.device) -> float:
    """Epsilon of products in a dtype; torch may compute those of float32 in lower precision."""
    less = {"tf32": 2**-10, "bf16": 2**-7}
    return max(torch.finfo(dtype).eps, less.get(float32_precision(device.type), 0.0))


@contextmanager
def _changed_embeddings(model: Any) -> Iterator[None]:
    """Context in which each element of an embedding is larger or smaller by the dtype's epsilon."""

    def change(_module: Any, _args: Any, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        return output * (1 + torch.finfo(output.dtype).eps * signs.to(output))

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Context that restores the attention of all parts of a model at its end."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = [part.config for part in parts]
    configs += [getattr(config, name, None) for config in configs for name in config.sub_configs]
    before = [(config, config._attn_implementation) for config in configs if config is not None]
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
