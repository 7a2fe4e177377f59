"""Layers by example: growth, memory, limits, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from oracles.bits import FLOATS, assert_same_bits, generator
from torch import Tensor

from kvloom.caches import DynamicLayer, Layer, QuantizedLayer, SlidingWindowLayer, StaticLayer
from kvloom.errors import ArgumentError, ConfigError, ShapeError, StateError

KINDS: dict[str, Callable[[], Layer]] = {
    "dynamic": DynamicLayer,
    "static": lambda: StaticLayer(32),
    "sliding": lambda: SlidingWindowLayer(4, rollback=2),
    "quantized": lambda: QuantizedLayer("int8:g4", recent=3, values="int4:g4"),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def tokens(batch: int, count: int, seed: int = 0, heads: int = 2, width: int = 8) -> Tensor:
    return torch.randn(batch, heads, count, width, generator=generator(seed))


def update(layer: Layer, batch: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return layer.update(tokens(batch, count, seed), tokens(batch, count, seed + 1000))


def allocations(layer: Layer, steps: int) -> int:
    """Different sizes of memory that ``steps`` updates of one token go through."""
    sizes = set()
    for _ in range(steps):
        update(layer, 1, 1)
        sizes.add(layer.nbytes)
    return len(sizes)


# --- growth and memory --------------------------------------------------------------------------------------


def test_dynamic_layer_allocates_logarithmically_often() -> None:
    layer = DynamicLayer()
    assert allocations(layer, 2000) <= 14
    assert layer.nbytes <= 1.5 * 2000 * 2 * 2 * 8 * 4


def test_quantized_layer_allocates_logarithmically_often() -> None:
    assert allocations(QuantizedLayer("int8:g4", recent=5), 500) <= 14


def test_dynamic_layer_returns_views_of_one_storage() -> None:
    layer = DynamicLayer()
    update(layer, 2, 20)
    update(layer, 2, 1)
    first, second = update(layer, 2, 1)[0], update(layer, 2, 1)[0]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert (first.shape[2], second.shape[2]) == (22, 23)


@pytest.mark.parametrize("make", [DynamicLayer, KINDS["sliding"], KINDS["quantized"]])
def test_what_update_returned_stays_while_tokens_are_added(make: Callable[[], Layer]) -> None:
    layer, returned = make(), []
    for step in range(30):
        for x in update(layer, 1, 1 + step % 3, seed=step):
            returned.append((x, x.clone()))
    for x, before in returned:
        assert torch.equal(x, before)


@pytest.mark.parametrize("rollback", [0, 5])
def test_sliding_layer_gives_a_long_prefill_back(rollback: int) -> None:
    window, token_bytes = 16, 2 * 8 * 4
    layer = SlidingWindowLayer(window, rollback)
    assert update(layer, 1, 3000)[0].shape[2] == 3000
    for step in range(100):
        assert layer.storage is not None
        stored = sum(x.untyped_storage().nbytes() for x in layer.storage.tensors if x is not None)
        assert layer.nbytes == stored <= 2 * 2 * (window + rollback) * token_bytes
        assert layer.keys.shape[2] == window - 1 + rollback
        assert update(layer, 1, 1, seed=step)[0].shape[2] == window
    assert layer.get_seq_length() == 3100


@every_kind
def test_nbytes_is_zero_before_the_first_update(make: Callable[[], Layer]) -> None:
    layer = make()
    assert layer.nbytes == 0
    update(layer, 1, 1)
    assert layer.nbytes > 0


def test_quantized_layer_is_smaller() -> None:
    plain, codes = DynamicLayer(), QuantizedLayer("int4:g64", recent=8)
    for layer in (plain, codes):
        layer.update(tokens(1, 1000, width=64).half(), tokens(1, 1000, width=64).half())
    # 4 bits, and 16 for the scale of 64 elements; beside them the window, unquantized.
    assert codes.nbytes - codes.nbytes_recent < 0.27 * plain.nbytes
    assert 7 * 2 * 2 * 64 * 2 <= codes.nbytes_recent <= 0.035 * plain.nbytes


@pytest.mark.parametrize("make", [DynamicLayer, lambda: SlidingWindowLayer(3), KINDS["quantized"]])
def test_reset_gives_memory_and_shapes_back(make: Callable[[], Layer]) -> None:
    layer = make()
    update(layer, 2, 9)
    layer.reset()
    assert (layer.nbytes, layer.get_seq_length()) == (0, 0)
    layer.update(tokens(1, 2, heads=3, width=4).half(), tokens(1, 2, heads=3, width=12).half())
    assert layer.get_seq_length() == 2


# --- the static layer ---------------------------------------------------------------------------------------


def test_static_storage_never_moves() -> None:
    layer = StaticLayer(8)
    layer.allocate(2, 2, 8, 8, torch.float32)
    places = [x.data_ptr() for x in (layer.keys, layer.values)]
    update(layer, 2, 3)
    layer.reorder(torch.tensor([1, 1]))
    layer.crop(-1)
    layer.reset()
    assert [x.data_ptr() for x in update(layer, 2, 8)] == places
    assert layer.get_max_length() == 8


def test_static_overflow_is_refused_before_anything_is_written() -> None:
    layer = StaticLayer(5)
    with pytest.raises(StateError, match="max_length must hold 6 more tokens, got 5 with 0 taken"):
        update(layer, 1, 6)
    assert layer.nbytes == 0
    update(layer, 1, 4)
    before = layer.keys.clone()
    with pytest.raises(StateError, match="max_length must hold 2 more tokens, got 5 with 4 taken"):
        update(layer, 1, 2)
    assert_same_bits(layer.keys, before, "keys")
    assert int(layer.get_seq_length()) == 4
    update(layer, 1, 1)


def test_static_length_is_a_snapshot() -> None:
    layer = StaticLayer(5)
    update(layer, 1, 2)
    length = layer.get_seq_length()
    update(layer, 1, 2)
    assert (length.dtype, length.ndim, int(length)) == (torch.int64, 0, 2)


def test_allocated_shapes_bind() -> None:
    layer = StaticLayer(4)
    layer.allocate(1, 2, 8, 4, torch.float16)
    with pytest.raises(ShapeError, match=r"key must be torch.float16"):
        layer.update(tokens(1, 1), tokens(1, 1, width=4))
    with pytest.raises(StateError, match="allocate must come before"):
        layer.allocate(1, 2, 8, 4, torch.float16)
    with pytest.raises(ArgumentError, match="heads must be at least 1, got 0"):
        StaticLayer(4).allocate(1, 0, 8, 4, torch.float16)


# --- sliding ------------------------------------------------------------------------------------------------


def test_sliding_crop_refuses_what_is_gone() -> None:
    layer = SlidingWindowLayer(4, rollback=2)
    update(layer, 1, 10)
    before = layer.keys.clone()
    with pytest.raises(StateError, match=r"keep at least 8 tokens or none, got -3: of 10 .* first 5$"):
        layer.crop(-3)
    assert_same_bits(layer.keys, before, "keys")
    layer.crop(-2)
    assert layer.get_mask_sizes(1) == (4, 5)
    with pytest.raises(StateError, match="keep at least 8 tokens"):
        layer.crop(-1)
    layer.crop(0)
    assert (layer.get_seq_length(), layer.keys.shape[2]) == (0, 0)


def test_window_of_one_sees_nothing_stored() -> None:
    layer = SlidingWindowLayer(1)
    assert update(layer, 1, 5)[0].shape[2] == 5
    assert update(layer, 1, 1)[0].shape[2] == 1
    assert layer.keys.shape[2] == 0
    layer.crop(3)
    assert layer.get_seq_length() == 3


# --- every layer --------------------------------------------------------------------------------------------

BAD = {
    "rank of key": ((2, 2, 8), (2, 2, 1, 8), r"key must be \[B, H, Q, Dk\]"),
    "rank of value": ((2, 2, 1, 8), (2, 2, 8), r"value must be \[B, H, Q, Dv\]"),
    "batch": ((3, 2, 1, 8), (3, 2, 1, 8), "key must be .* B=2"),
    "heads": ((2, 3, 1, 8), (2, 3, 1, 8), "key must be .* H=2"),
    "width of key": ((2, 2, 1, 4), (2, 2, 1, 8), "key must be .* Dk=8"),
    "width of value": ((2, 2, 1, 8), (2, 2, 1, 4), "value must be .* Dv=8"),
    "count of values": ((2, 2, 1, 8), (2, 2, 2, 8), "value must be .* Q=1"),
}


@every_kind
@pytest.mark.parametrize(("key", "value", "message"), BAD.values(), ids=BAD)
def test_tokens_that_do_not_fit_are_refused(
    make: Callable[[], Layer], key: tuple[int, ...], value: tuple[int, ...], message: str
) -> None:
    layer = make()
    update(layer, 2, 5)
    before = [layer.keys.clone(), layer.values.clone()]
    with pytest.raises(ShapeError, match=message):
        layer.update(torch.ones(key), torch.ones(value))
    assert int(layer.get_seq_length()) == 5
    assert_same_bits(layer.keys.contiguous(), before[0].contiguous(), "keys")
    assert_same_bits(layer.values.contiguous(), before[1].contiguous(), "values")


@every_kind
@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        (torch.ones(2, 2, 1, 8).half(), torch.ones(2, 2, 1, 8).half(), "key"),
        (torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8).half(), "value"),
        (torch.ones(2, 2, 1, 8, device="meta"), torch.ones(2, 2, 1, 8, device="meta"), "key"),
        (torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8, device="meta"), "value"),
        ([[1.0]], torch.ones(2, 2, 1, 8), "key"),
    ],
    ids=["dtype", "value dtype", "device", "value device", "no tensor"],
)
def test_other_dtypes_and_devices_are_refused(
    make: Callable[[], Layer], key: Tensor, value: Tensor, name: str
) -> None:
    layer = make()
    update(layer, 2, 1)
    with pytest.raises(ShapeError, match=f"^{name} must be"):
        layer.update(key, value)
    assert int(layer.get_seq_length()) == 1


@every_kind
def test_bad_rows_are_refused_by_name(make: Callable[[], Layer]) -> None:
    layer = make()
    update(layer, 2, 5)
    before = layer.keys.clone()
    for call, rows, error in (
        (layer.reorder, torch.tensor([0, 2]), ArgumentError),
        (layer.reorder, torch.tensor([0, -1]), ArgumentError),
        (layer.reorder, torch.tensor([0]), ShapeError),
        (layer.reorder, torch.tensor([0.0, 1.0]), ShapeError),
        (layer.select, torch.tensor([[0]]), ShapeError),
        (layer.select, torch.tensor([True]), ShapeError),
        (layer.select, [0], ShapeError),
    ):
        with pytest.raises(error, match=r"^rows must be"):
            call(rows)  # type: ignore[arg-type]
    for n in (0, -1, True, 1.5):
        with pytest.raises(ArgumentError, match=r"^n must be"):
            layer.repeat_interleave(n)  # type: ignore[arg-type]
    for count in (1.5, None, True):
        with pytest.raises(ArgumentError, match=r"^num_tokens must be an int"):
            layer.crop(count)  # type: ignore[arg-type]
    assert_same_bits(layer.keys.contiguous(), before.contiguous(), "keys")


@every_kind
def test_an_empty_layer_takes_every_call(make: Callable[[], Layer]) -> None:
    layer = make()
    layer.reorder(torch.tensor([3]))
    layer.select(torch.tensor([3]))
    layer.repeat_interleave(3)
    layer.crop(-5)
    layer.crop(5)
    layer.reset()
    assert int(layer.get_seq_length()) == 0
    with pytest.raises(StateError, match="no tokens were stored"):
        _ = layer.keys


@every_kind
def test_a_batch_without_sequences_is_refused(make: Callable[[], Layer]) -> None:
    layer = make()
    for call in (layer.update, layer.append):
        with pytest.raises(ShapeError, match=r"key must have at least one sequence, got \[0, 2, 3, 8\]"):
            call(tokens(0, 3), tokens(0, 3))
    assert (layer.size, layer.num_tokens, layer.nbytes) == (0, 0, 0)
    update(layer, 2, 3)


@every_kind
def test_tokens_are_kept_without_their_gradient(make: Callable[[], Layer]) -> None:
    layer = make()
    for _ in range(9):
        result = layer.update(tokens(1, 2).requires_grad_(), tokens(1, 2).requires_grad_())
    assert not any(x.requires_grad for x in (*result, layer.keys, layer.values))


@every_kind
def test_layer_outlives_inference_mode(make: Callable[[], Layer]) -> None:
    with torch.inference_mode():
        layer = make()
        update(layer, 2, 5)
        layer.repeat_interleave(2)
    update(layer, 4, 3)
    layer.crop(-1)
    with torch.inference_mode():
        layer.reorder(torch.tensor([3, 2, 1, 0]))
    update(layer, 4, 2)
    assert int(layer.get_seq_length()) == 9


@every_kind
def test_deepcopy_is_independent(make: Callable[[], Layer]) -> None:
    layer = make()
    update(layer, 2, 5)
    other = copy.deepcopy(layer)
    before = layer.keys.clone()
    update(other, 2, 3, seed=7)
    assert int(layer.get_seq_length()) == 5
    assert_same_bits(layer.keys.contiguous(), before.contiguous(), "keys")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@every_kind
def test_results_have_the_dtype_of_the_tokens(make: Callable[[], Layer], dtype: torch.dtype) -> None:
    assert [x.dtype for x in make().update(tokens(1, 9).to(dtype), tokens(1, 9).to(dtype))] == [dtype] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda n=n: StaticLayer(n), "max_length must be") for n in (0, -1, True, 1.5, None)]
    + [(lambda n=n: SlidingWindowLayer(n), "window must be") for n in (0, True, None)]
    + [(lambda: SlidingWindowLayer(1, -1), "rollback must be"),
       (lambda: QuantizedLayer(recent=-1), "recent must be"),
       (lambda: QuantizedLayer(scale_dtype=torch.float64), "scale_dtype must be")],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(make: Callable[[], Layer], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: QuantizedLayer("int3"), "kv"), (lambda: QuantizedLayer(values="int5"), "values"),
     (lambda: QuantizedLayer("int8:g0"), "kv"), (lambda: QuantizedLayer("float16"), "kv")],
)  # fmt: skip
def test_what_spells_no_codes_is_refused_by_name(make: Callable[[], Layer], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be one of int8, "):
        make()


def test_quantized_layer_refuses_what_it_cannot_quantize() -> None:
    layer = QuantizedLayer("int8:g16")
    with pytest.raises(ConfigError, match="head_dim must be a multiple of group 16, got 8"):
        update(layer, 1, 1)
    with pytest.raises(ShapeError, match=r"key must be torch.float32 or .*, got torch.int32"):
        layer.update(torch.ones(1, 1, 1, 16).int(), torch.ones(1, 1, 1, 16).int())
    assert (layer.nbytes, layer.get_seq_length()) == (0, 0)
