"""Benchmarks as tests run them."""

from __future__ import annotations

import gc
import json
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def quick(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Any]]:
    """Runs a benchmark with ``--quick`` and returns its line."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads, disabled = torch.get_num_threads(), logging.root.manager.disable
    num_frozen = gc.get_freeze_count()

    def run(name: str, *args: str) -> Any:
        monkeypatch.setattr(sys, "argv", [name, "--quick", *args])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        result = json.loads(lines[-1])
        assert len(lines) == 1
        assert result["figure"] == name
        return result

    yield run
    torch.set_num_threads(threads)
    logging.disable(disabled)
    if gc.get_freeze_count() > num_frozen:  # by the benchmark: modules stay frozen, what it made goes
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    for module in [*sys.modules]:
        if (BENCHMARKS / f"{module}.py").exists():
            del sys.modules[module]
