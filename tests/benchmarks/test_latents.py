"""The benchmark of latent attention runs, and its figures stand in their section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_steps_of_every_kind_are_measured(quick: Callable[..., Any]) -> None:
    import latent_sections

    result = quick("latents")
    assert {(x["dtype"], x["kv"]) for x in result["steps"]} >= {("float32", "auto"), ("bfloat16", "int4")}
    for row in result["steps"]:
        row |= {"over_dynamic_cache": 0.0136, "ms": 2.26, "nbytes_per_token": 3456}
    result["costs"] = [
        {"kv": "int4", "nbytes_per_token": 500, "mean_kl": 0.002, "agreed": 0.985, "change": 0.0041}
    ]
    text = latent_sections.latents_section(result)
    assert "| float32 | auto | 1,152 | 0.014 (2.3 ms) |" in text
    assert "| int4 | 500 | 2.0e-03 | 98.5% | +0.41% |" in text
