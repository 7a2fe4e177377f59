"""``ops.KeySmoothing`` and its operators refuse bad arguments by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.cases import offset_of

from kvloom import ops
from kvloom.errors import ArgumentError, KVError, ShapeError
from kvloom.ops import KeySmoothing, schemas

compiled = pytest.mark.skipif(ops.cpu_kernels() is None, reason="there are no compiled kernels")
GAIN = torch.ones(2, 16)


@pytest.mark.parametrize(
    ("gain", "offset", "error", "message"),
    [
        (None, None, ShapeError, "^gain must be a tensor, got NoneType$"),
        (torch.ones(16), None, ShapeError, r"^gain must be \[H, D\], got \[16\]$"),
        (GAIN.double(), None, ShapeError, "^gain must be torch.float32, got torch.float64$"),
        (GAIN - 1, None, ArgumentError, "^gain must be positive and finite, .*, got 0.0$"),
        (-GAIN, None, ArgumentError, "^gain must be positive and finite, .*, got -1.0$"),
        (GAIN * float("nan"), None, ArgumentError, "^gain must be positive and finite, .*, got nan$"),
        (GAIN * float("inf"), None, ArgumentError, "^gain must be positive and finite, .*, got inf$"),
        (GAIN * 1e-40, None, ArgumentError, "^gain must be positive and finite, as its inverse, got"),
        (torch.ones(3, 16), offset_of(), ShapeError, "^offset must have 3 heads of 16 as gain, got 2 of 16$"),
        (torch.ones(2, 18), offset_of(), ShapeError, "^offset must have 2 heads of 18 as gain, got 2 of 16$"),
        (GAIN, offset_of(float("inf")), ArgumentError, "^offset must have finite mean, got"),
    ],
)
def test_bad_numbers_are_refused(gain: Any, offset: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        KeySmoothing(gain, offset)


X, AT = torch.ones(3, 2, 16), torch.arange(3)


@pytest.mark.parametrize(
    ("x", "positions", "block", "error", "message"),
    [
        (None, AT, 0, ShapeError, "^key must be a tensor, got NoneType$"),
        (torch.ones(()), AT, 0, ShapeError, r"^key must be \[T, 2, 16\] or \[B, 2, N, 16\], got \[\]$"),
        (torch.ones(3, 16), AT, 0, ShapeError, r"^key must be .*, got \[3, 16\]$"),
        (torch.ones(3, 4, 16), AT, 0, ShapeError, r"^key must be .*, got \[3, 4, 16\]$"),
        (torch.ones(3, 2, 8), AT, 0, ShapeError, r"^key must be .*, got \[3, 2, 8\]$"),
        (X.double(), AT, 0, ShapeError, r"^key must be one of .* on cpu, got torch.float64 on cpu$"),
        (X.to("meta"), AT, 0, ShapeError, r"^key must be one of .* on cpu, got torch.float32 on meta$"),
        (X, None, 0, ShapeError, "^positions must be a tensor, got NoneType$"),
        (X, AT[:2], 0, ShapeError, r"^positions must be \[3\], as tokens of key, got \[2\]$"),
        (X[None].mT.mT, AT, 0, ShapeError, r"^key must be|^positions must be"),
        (X, AT.double(), 0, ShapeError, "^positions must be one of .*, got torch.float64 on cpu$"),
        (X, AT.to("meta"), 0, ShapeError, "^positions must be one of .*, got torch.int64 on meta$"),
        (X, AT, 3, ArgumentError, "^block must be 0, or a power of two that divides the head dim 16, got 3$"),
        (X, AT, 32, ArgumentError, "^block must be 0, or a power of two .* 16, got 32$"),
        (X, AT, 2048, ArgumentError, r"^block must be in \[0, 1025\), got 2048$"),
        (X, AT, -1, ArgumentError, "^block must be"),
        (X, AT, 1.5, ArgumentError, "^block must be an int, got 1.5$"),
    ],
)
def test_bad_keys_are_refused(x: Any, positions: Any, block: Any, error: type[KVError], message: str) -> None:
    smoothing = KeySmoothing(GAIN, offset_of())
    with pytest.raises(error, match=message):
        smoothing.smoothed(x, positions, block)
    with pytest.raises(error, match=message):
        smoothing.restored(x, positions, block)


@pytest.mark.parametrize(
    ("x", "block", "error", "message"),
    [
        (None, 0, ShapeError, "^query must be a tensor, got NoneType$"),
        (
            torch.ones(3, 3, 16),
            0,
            ShapeError,
            r"^query must be \[T, Hq, 16\] .* of 2 heads, got \[3, 3, 16\]$",
        ),
        (torch.ones(1, 2, 3, 16), 0, ShapeError, r"^query must be .*, got \[1, 2, 3, 16\]$"),
        (X.double(), 0, ShapeError, "^query must be one of .* on cpu, got torch.float64 on cpu$"),
        (X, 3, ArgumentError, "^block must be 0, or a power of two that divides the head dim 16, got 3$"),
    ],
)
def test_bad_queries_are_refused(x: Any, block: Any, error: type[KVError], message: str) -> None:
    with pytest.raises(error, match=message):
        KeySmoothing(GAIN, offset_of()).query(x, None, block)


def bare(**changed: Any) -> dict[str, Any]:
    offset = offset_of()
    given = {"key": X, "positions": AT, "factor": GAIN, "mean": offset.mean, "channels": offset.channels}
    return given | {"frequencies": offset.frequencies, "block": 0, "is_restored": False} | changed


@compiled
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"key": torch.ones(8)}, "key must have 3 or 4 dimensions"),
        ({"key": X.int()}, "key or query must be float32, float16 or bfloat16"),
        ({"key": torch.ones(3, 2, 32)[..., ::2]}, "key or query must be contiguous"),
        ({"key": torch.ones(3, 4, 16)}, "key must have the heads of factor"),
        ({"key": torch.ones(3, 2, 5000), "factor": torch.ones(2, 5000)}, "at most 4096 elements"),
        ({"block": 3}, "block must be 0, or"),
        ({"block": -8}, "block must be 0, or"),
        ({"factor": torch.ones(2, 8)}, "factor or gain must be"),
        ({"factor": torch.ones(16)}, "factor or gain must be"),
        ({"factor": GAIN.double()}, "factor or gain must be"),
        ({"positions": AT[:2]}, "positions must be one for each token"),
        ({"positions": AT.double()}, "positions must be int64 or int32"),
        ({"positions": AT[None]}, "positions must be int64 or int32"),
        ({"mean": None}, "mean, channels and frequencies must be there"),
        ({"mean": torch.ones(1, 3, 2)}, "mean and channels must be"),
        ({"mean": torch.ones(2, 2, 2)}, "mean and channels must be"),
        ({"channels": torch.full((2, 3, 2), 16)}, "channels must be in the head dim"),
        ({"channels": torch.full((2, 3, 2), -1)}, "channels must be in the head dim"),
        ({"channels": torch.zeros(2, 3, 2).int()}, "mean and channels must be"),
        ({"frequencies": torch.ones(1, 3)}, "frequencies must be"),
        ({"frequencies": torch.ones(2, 65)}, "frequencies must be of 1 to 64 pairs"),
        ({"frequencies": torch.ones(2, 0)}, "frequencies must be of 1 to 64 pairs"),
    ],
    ids=str,
)
def test_the_kernel_itself_refuses_what_it_would_read_wrong(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexError, match=f"ArgumentError: .*{message}"):
        schemas.smooth(**bare(**changed))


@compiled
def test_the_kernel_of_queries_refuses_what_it_would_read_wrong() -> None:
    mean, channels = bare()["mean"], bare()["channels"]
    for query, of_mean, of_channels, message in (
        (torch.ones(1, 2, 3, 16), mean, channels, "query must have 3 dimensions"),
        (torch.ones(3, 3, 16), mean, channels, "query must have a multiple of the heads of gain"),
        (X, mean, None, "mean must be"),
        (X, mean[0], channels, "mean must be"),
        (X, mean, channels + 16, "channels must be in the head dim"),
        (X, torch.ones(2, 65, 2), channels, "mean must be of 1 to 64 pairs"),
    ):
        with pytest.raises(IndexError, match=f"ArgumentError: {message}"):
            schemas.smooth_query(query, GAIN, of_mean, of_channels, 0)
