"""Pages that a CPU would fill with other numbers: refused at start, by vLLM itself from 0.33 on."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from integrations.vllm.engines import INT8, Engine, needs_vllm, prompts, random_model, tokens_of
from integrations.vllm.test_models import SMALL

from kvloom.errors import UnsupportedError

needs_vllm()
pytestmark = pytest.mark.filterwarnings("ignore")


def kinds() -> list[str]:
    """Values of ``--kv-cache-dtype`` that neither vLLM's CPU kernels nor kvloom's know."""
    from typing import get_args

    from vllm.config.cache import CacheDType

    known = {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", INT8, "int4_per_token_head"}
    return sorted(set(get_args(CacheDType)) - known)


@pytest.mark.parametrize("kind", kinds())
def test_kinds_that_nobody_has_are_refused(kind: str) -> None:
    served = "auto, fp8, fp8_e4m3, fp8_e5m2, int8_per_token_head, int4_per_token_head or the model's float32"
    ours = f"kv_cache_dtype must be {served} on a CPU, got '{kind}'"
    theirs = f'{kind} is not supported by the CPU|kv_cache_dtype="{kind}" is incompatible'
    with pytest.raises((UnsupportedError, ValueError), match=f"{ours}|{theirs}"):
        Engine(kv_cache_dtype=kind)


def test_the_models_own_dtype_may_be_named() -> None:
    texts = prompts()[:3]
    expected = tokens_of(texts=texts, dtype="bfloat16")
    assert tokens_of(texts=texts, dtype="bfloat16", kv_cache_dtype="bfloat16") == expected


def falcon(folder: Path) -> Path:
    from transformers import FalconConfig

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    small = {name: SMALL[name] for name in names}
    config = FalconConfig(**small, new_decoder_architecture=False, multi_query=True, alibi=False, bias=False)
    return random_model(folder, config)


def test_layers_that_are_told_of_no_kind_are_refused(tmp_path: Path) -> None:
    model = falcon(tmp_path)
    with closing(Engine(model)) as engine:
        assert engine.kinds() == {"vLLM"}
    with pytest.raises(
        UnsupportedError, match=r"kv_cache_dtype must be auto for .* got 'int8_per_token_head'"
    ):
        Engine(model, kv_cache_dtype=INT8)
