"""A library of custom operators for ONNX Runtime is judged: one that runs operators written in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")
from kvloom.conform.running import run
from kvloom.conform.targets import open_target
from kvloom.conform.vectors import Vector, published, read
from kvloom.dialects import pmx

ATTRIBUTES = ("num_layer", "layer_idx", "quant_bit", "quant_group", "num_repeat", "cache_layout")


class Operator:
    """``pmx::KeyValueCache`` of int8 codes with float32 scales."""

    changes_value = False
    library = ""

    def __call__(self, key: Any, value: Any, start_pos: Any, cache: Any, scale: Any, **given: int) -> Any:
        k, v, codes, scales = (torch.from_numpy(x.copy()) for x in (key, value, cache, scale))
        results = pmx.key_value_cache(k, v, int(start_pos), codes, scales, **given)
        if self.changes_value:
            results = (results[1], results[1])
        return tuple(x.numpy() for x in (*results, codes, scales))


@pytest.fixture(scope="module")
def operator() -> Operator:
    extensions = pytest.importorskip("onnxruntime_extensions")
    kinds = extensions.PyCustomOpDef
    made = Operator()
    # The library knows it by its name as long as the process lives; an error in it would end the process.
    extensions.onnx_op(
        op_type="pmx::KeyValueCache",
        inputs=[kinds.dt_float, kinds.dt_float, kinds.dt_int64, kinds.dt_int8, kinds.dt_float],
        outputs=[kinds.dt_float, kinds.dt_float, kinds.dt_int8, kinds.dt_float],
        attrs=dict.fromkeys(ATTRIBUTES, kinds.dt_int64),
    )(made.__call__)
    made.library = extensions.get_library_path()
    return made


def vectors() -> list[Vector]:
    """Legal calls of the dtypes that the operator has."""
    wanted = {"current_key": torch.float32, "cache": torch.int8, "scale": torch.float32}
    legal = [x for x in read(published(), "pmx.key_value_cache") if x.expected is not None]
    said = [x for x in legal if all(name in x.call for name in ATTRIBUTES)]  # the library has no defaults
    return [x for x in said if all(n in x.call and x.call[n].dtype == t for n, t in wanted.items())]


@pytest.mark.parametrize("changes_value", [False, True])
def test_what_an_operator_updates_is_judged_behind_its_results(
    operator: Operator, changes_value: bool
) -> None:
    operator.changes_value = changes_value
    report = run(open_target(operator.library), vectors())
    assert len(report.outcomes) >= 10
    assert not report.count("skipped")
    assert report.passed != changes_value
    assert all(x.message.startswith("key differs at ") for x in report.failures)
