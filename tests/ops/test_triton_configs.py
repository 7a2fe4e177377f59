"""Configurations are pinned, and others are used where they are asked for and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ops import kernels
from ops.attention import make_case
from ops.kernels import attend
from oracles.bits import assert_same_bits

configs = pytest.importorskip("kvloom.ops.impl.triton.configs", reason="Triton is not installed")
plan = pytest.importorskip("kvloom.ops.impl.triton.attending.plan", reason="Triton is not installed")

CASES = [
    configs.Case(is_split, itemsize, bits, head_dim, ratio)
    for is_split in (True, False)
    for itemsize in (2, 4)
    for bits in (0, 4, 8)
    for head_dim in (16, 64, 128, 256, 512)
    for ratio in (1, 3, 4, 8, 71, 128)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pinned_tiles_are_what_products_and_runs_take(case: tuple[int, ...]) -> None:
    config = configs.pinned(case)
    for extent, least in ((config.rows, 8), (config.tokens, 16)):
        assert extent >= least
        assert extent & (extent - 1) == 0
    assert plan.RUN_UNIT % config.tokens == 0
    assert plan.MIN_RUN % plan.RUN_UNIT == 0


def test_what_was_tuned_is_kept_for_each_device(tmp_path: Path) -> None:
    path, table = tmp_path / "tuned.json", {CASES[0]: configs.Config(16, 32, 4, 2, 1)}
    configs.write_tuned(path, "one", table)
    configs.write_tuned(path, "other", {})
    assert configs.read_tuned(path, "one") == table
    assert configs.read_tuned(path, "other") == configs.read_tuned(path, "third") == {}


def test_tuned_configurations_hold_within_their_context() -> None:
    config = configs.Config(16, 16, 4, 1, 1)
    with pytest.raises(KeyError), configs.tuned({CASES[0]: config}):
        assert configs.config_for(CASES[0]) == config
        assert configs.config_for(CASES[1]) == configs.pinned(CASES[1])
        raise KeyError
    assert configs.config_for(CASES[0]) == configs.pinned(CASES[0])


@pytest.mark.skipif(bool(kernels.WHY_NOT), reason=kernels.WHY_NOT)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_tuned_call_differs_by_rounding_only() -> None:
    case = make_case([2, 20], [300, 70], head_dim=16, page_size=16, block_size=16)
    expected = attend(case)
    small = configs.Config(16, 16, 4, 1, 1)
    with configs.tuned({configs.Case(is_split, 4, 0, 16, 2): small for is_split in (True, False)}):
        torch.testing.assert_close(attend(case), expected, rtol=1e-5, atol=1e-6)
    assert_same_bits(attend(case), expected, "output")
