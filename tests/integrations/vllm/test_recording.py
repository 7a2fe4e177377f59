"""A forward whose keys and queries are recorded, attending without pages of vLLM's; without vLLM.

Shapes: two rows of T tokens, H key/value heads, Hq query heads, D head dim.
"""

import pytest
import torch
from torch import Tensor, nn

from kvloom import ops
from kvloom.integrations.vllm.frequencies import frequencies_of, positions_of
from kvloom.integrations.vllm.recording import Recording

T, HEADS, QUERIES, DIM = 40, 2, 4, 32


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2 * T, n, DIM, generator=generator) for n in (QUERIES, HEADS, HEADS))


def expected(query: Tensor, key: Tensor, value: Tensor, window: int = T) -> Tensor:
    q, k, v = (x.unflatten(0, (2, T)).transpose(1, 2) for x in (query, key, value))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    mask = (behind >= 0) & (behind < window)
    found = nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return found.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("window", [None, 7])
def test_rows_attend_to_themselves(window: int | None) -> None:
    (query, key, value), recording = tensors(), Recording(2, T)
    out = torch.full_like(query, torch.nan)
    recording.attend("a", ops.Scores(window=window), query, key, value, out)
    torch.testing.assert_close(out, expected(query, key, value, window or T), atol=1e-5, rtol=1e-5)


def test_keys_and_the_size_of_queries_of_the_first_row_are_kept() -> None:
    (query, key, value), recording = tensors(), Recording(2, T)
    recording.attend("a", ops.Scores(), query, key, value, torch.empty_like(query))
    kept = key.clone()
    key.zero_()
    assert torch.equal(recording.keys["a"], kept.unflatten(0, (2, T)).transpose(1, 2))
    torch.testing.assert_close(recording.query_power("a"), query[:T].square().mean(0))
    assert recording.query_power("b") is None


def test_layers_may_read_the_keys_of_another() -> None:
    (query, key, value), recording = tensors(), Recording(2, T)
    out = torch.empty_like(query)
    recording.attend("a", ops.Scores(), query, key, value, out)
    recording.attend("a", ops.Scores(), 3 * query, torch.zeros_like(key), torch.zeros_like(value), out)
    torch.testing.assert_close(out, expected(3 * query, key, value), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(recording.query_power("a"), 5 * query[:T].square().mean(0))


class Rotary(nn.Module):
    """One of vLLM's, as far as it is asked: ``scale`` is what sines and cosines have and frequencies not."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("cos_sin_cache", self._compute_cos_sin_cache().to(dtype), persistent=False)

    def _compute_inv_freq(self, base: float) -> Tensor:
        return 1.0 / base ** (torch.arange(0, 16, 2).float() / 16)

    def _compute_cos_sin_cache(self) -> Tensor:
        angle = torch.arange(100.0)[:, None] / self.scale * self._compute_inv_freq(100.0)
        return torch.cat((2 * angle.cos(), 2 * angle.sin()), -1)


def test_frequencies_are_those_that_a_module_computes_with() -> None:
    rotary = Rotary()
    (found,) = frequencies_of(nn.ModuleList([rotary, nn.Linear(2, 2), Rotary()]))
    assert torch.equal(found, rotary._compute_inv_freq(100.0).double())
    assert "_compute_inv_freq" not in vars(rotary)


def test_frequencies_that_are_scaled_later_are_those_of_the_sines() -> None:
    rotary = Rotary(scale=4.0)
    (found,) = frequencies_of(rotary)
    torch.testing.assert_close(found, rotary._compute_inv_freq(100.0).double() / 4, rtol=1e-6, atol=0)


def test_the_fewest_positions_count() -> None:
    short = Rotary()
    short.cos_sin_cache = short.cos_sin_cache[:30]
    assert positions_of(nn.ModuleList([Rotary(), short])) == 30
    assert positions_of(nn.Linear(2, 2)) is None and frequencies_of(nn.Linear(2, 2)) == []
