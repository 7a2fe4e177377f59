"""A small model that answers from far back, trained in minutes on two slow cores and kept for the next time.

A Llama of two layers, which recall needs at least: the first tells each token what is before it, the second
finds what is read by that. Texts are short at first, so that it learns to find, and then longer, so that it
does from far back; they grow when most answers are right. Muon trains the matrices, AdamW the rest.
"""

import random
import sys
from pathlib import Path
from typing import Any, Final

import kept_model as kept
import recall_task
import torch
from recall_task import MOST_RECORDS, RECORD, Texts, answers, expected_answers, make_texts
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH: Final = 1024
"""Tokens of the longest texts."""
_LENGTHS: Final = (48, 64, 128, 256, 512, LENGTH)
_TOKENS: Final = 2048
"""Of a step; twice as many of long texts, which are few."""
_LONG: Final = 512
_ENOUGH: Final = 0.8
"""Share of right answers from which on texts get longer."""
_LAST: Final = 160
"""Steps of the longest texts, in which the learning rate falls to nothing."""
_MOST: Final = 2500
"""Steps of shorter ones; whoever needs more learns nothing."""
_WARMUP: Final = 30
_SEED: Final = 0
_FILES: Final = (__file__, kept.__file__, recall_task.__file__)
_SOURCES: Final = b"".join(Path(str(x)).read_bytes() for x in _FILES)
"""What decides the weights."""


def untrained_model() -> Any:
    """The model with random weights, the same ones each time."""
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=recall_task.NOISE.stop,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config).eval()


def trained_model() -> Any:
    """The trained model: that of the last time, if the task and the training are as they were then."""
    return kept.kept_model("recall", _SOURCES, untrained_model, train)


def train(model: Any) -> None:
    """Train in place until the longest texts have been read; progress goes to stderr."""
    rng = random.Random(_SEED)
    optimizers = kept.optimizers_of(model)
    peaks = [x.param_groups[0]["lr"] for x in optimizers]
    lengths = iter(_LENGTHS)
    length, right, left = next(lengths), 0.0, _LAST
    for step in range(_MOST + _LAST):
        is_last = length == LENGTH
        factor = min(1.0, (step + 1) / _WARMUP, left / _LAST * 1.5)
        left -= is_last
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        loss, share = _loss(model, _texts(rng, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        right += 0.1 * (share - right)
        if step % 50 == 0 or not left:
            sys.stderr.write(f"step {step}, {length} tokens: loss {loss.item():.3f}, exact {right:.1%}\n")
        if not left:
            return
        if right > _ENOUGH and not is_last:
            length, right = next(lengths), 0.0
    raise RuntimeError(f"training must reach texts of {LENGTH} tokens, got stuck at {length}")


def _texts(rng: random.Random, length: int) -> Texts:
    """A batch; short texts ask for each record, long ones for some, behind noise."""
    is_short = length <= _LENGTHS[1]
    gap = 0 if is_short else rng.randrange(length // 4)
    records = min(MOST_RECORDS, (length - gap) // rng.randrange(2 * RECORD, 3 * RECORD + 1))
    questions = records if is_short else rng.randint(records // 4, records)
    rows = _TOKENS * (1 + (length >= _LONG)) // length
    return make_texts(rng, rows, length, records=records, questions=questions, gap=gap)


def _loss(model: Any, texts: Texts) -> tuple[torch.Tensor, float]:
    """Mean loss of the symbols of all answers, and the share of those of which all symbols are right."""
    logits = answers(model(texts.tokens, use_cache=False).logits[:, texts.prompt :])
    expected = expected_answers(texts)
    share = (logits.argmax(-1) == expected).all(-1).double().mean()
    return cross_entropy(logits.flatten(0, 2), expected.flatten()), float(share)
