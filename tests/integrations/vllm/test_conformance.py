"""vLLM's own kernel writes what the conformance kit says it writes, and reads gaps between heads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from integrations.vllm.engines import needs_vllm

needs_vllm()


@pytest.mark.process
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kit_and_vllm_agree_on_everything_but_gaps_between_heads() -> None:
    script = Path(__file__).with_name("triton_writes.py")
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "vllm.reshape_and_cache whole passed": 68,
        "vllm.reshape_and_cache gaps failed": 12,
        "vllm.reshape_and_cache_flash whole passed": 77,
        "vllm.reshape_and_cache_flash gaps failed": 13,
    }
