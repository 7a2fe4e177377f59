"""Recurrent layers and a store: pages and the states behind them, found together or not at all."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.vllm.engines import INT8, Engine, needs_vllm, prompts, random_model
from integrations.vllm.test_connector import counts, on
from integrations.vllm.test_hybrids import granite
from integrations.vllm.test_models import SMALL

from kvloom.errors import UnsupportedError

needs_vllm()
pytest.importorskip("xxhash")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 24
FEW = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 256, "prefix_cache_retention_interval": 128}


def lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(
        **{**SMALL, "num_hidden_layers": 4}, layer_types=["conv", "full_attention"] * 2, conv_dim=128,
        block_dim=128, block_ff_dim=256, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
    )  # fmt: skip


def qwen() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **{**SMALL, "num_hidden_layers": 4, "head_dim": 64},
        linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=128, linear_value_head_dim=128,
        mlp_only_layers=[0, 1, 2], num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, tie_word_embeddings=False,
    )  # fmt: skip


def falcon_h1() -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(  # each layer attends and is recurrent
        **{**SMALL, "num_hidden_layers": 2}, tie_word_embeddings=False,
        mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16,
        mamba_chunk_size=64,
    )  # fmt: skip


def texts() -> list[str]:
    """Four that begin with the same 2,400 characters, and one that does not."""
    text, other = prompts()[1], prompts()[3]
    return [*(text[:2400] + end for end in ("", "\ndef foo(", "\nclass Bar:", text[2400:])), other]


def tokens(found: list[Any]) -> list[list[int]]:
    return [list(request.outputs[0].token_ids) for request in found]


def whole(found: list[Any], size: int) -> list[int]:
    """Tokens of whole blocks in front of the last token of each prompt."""
    return [(len(request.prompt_token_ids) - 1) // size * size for request in found]


def state_files(folder: Path) -> list[Path]:
    files = [
        file for file in sorted(folder.glob("*/*.safetensors")) if b"states of vLLM" in file.read_bytes()
    ]
    assert files
    return files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("lfm2"), lfm2())


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with closing(Engine(model, kv_cache_dtype=INT8, enable_prefix_caching=False)) as engine:
        return tokens(engine.run(texts(), TOKENS))


def with_store(folder: Path, size: int = 128) -> dict[str, Any]:
    return {**on(folder), "block_size": size}


@pytest.mark.parametrize(
    ("config", "own", "size"),
    [
        (lfm2, {"block_size": 128}, 128),
        # Steps of Mamba2 must not have more tokens of a prompt than a block.
        (granite, {"block_size": None, "max_num_batched_tokens": 256}, 256),
        (falcon_h1, {"block_size": None, "max_num_batched_tokens": 256}, 256),
        (qwen, {"block_size": None, "dtype": "bfloat16"}, 512),
    ],
    ids=["lfm2", "granite", "falcon_h1", "qwen"],
)
def test_the_next_engine_finds_pages_and_the_states_behind_them(
    config: Any, own: dict[str, Any], size: int, tmp_path: Path
) -> None:
    folder = random_model(tmp_path / "model", config())
    arguments = {"model": folder, **on(tmp_path / "store"), **own}
    cold = {**arguments, "kv_transfer_config": None, "enable_prefix_caching": False}
    with closing(Engine(**cold)) as engine:
        expected = tokens(engine.run(texts(), TOKENS))
    with closing(Engine(**arguments)) as engine:
        assert tokens(engine.run(texts(), TOKENS)) == expected
        assert counts(engine)["tokens_loaded"] == 0
    with closing(Engine(**arguments)) as engine:
        found = engine.run(texts(), TOKENS)
        assert tokens(found) == expected
        assert [request.num_cached_tokens for request in found] == whole(found, size)
        assert counts(engine)["tokens_loaded"] > 0 and counts(engine)["tokens_failed"] == 0


def test_a_prefix_ends_where_states_are(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        [request] = engine.run(texts()[:1], 1)
        [kept] = whole([request], 128)
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        [longer] = engine.run(texts()[3:4], TOKENS)  # goes on behind a block in which no step ended
        assert tokens([longer]) == expected[3:4]
        assert longer.num_cached_tokens == kept
    for file in state_files(tmp_path):
        file.unlink()
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        found = engine.run(texts()[:1], TOKENS)
        assert tokens(found) == expected[:1]
        assert found[0].num_cached_tokens == 0 and counts(engine)["tokens_loaded"] == 0


def test_a_chat_goes_on_behind_its_answer(model: Path, tmp_path: Path) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    arguments = {**with_store(tmp_path), "prefix_cache_retention_interval": 128}
    with closing(Engine(model, **arguments)) as engine:
        [request] = engine.run(texts()[:1], 300)
        text = [*request.prompt_token_ids, *request.outputs[0].token_ids, 5, 6, 7]
    found = {}
    for name, own in (
        ("store", arguments),
        ("cold", {"kv_cache_dtype": INT8, "enable_prefix_caching": False}),
    ):
        with closing(Engine(model, **own)) as engine:
            prompt = {"prompt_token_ids": text}
            found[name] = engine.llm.generate([prompt], greedy, use_tqdm=False)
    assert tokens(found["store"]) == tokens(found["cold"])
    assert found["store"][0].num_cached_tokens == len(text) // 128 * 128 > len(request.prompt_token_ids)


def test_damaged_states_are_computed_told_and_rewritten(
    model: Path, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        engine.run(texts(), 1)
    files = state_files(tmp_path)
    for file in files:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        assert tokens(engine.run(texts(), TOKENS)) == expected
        assert counts(engine)["damaged"] > 0 and counts(engine)["tokens_failed"] > 0
    assert "damaged run, which is not used" in caplog.text
    assert set(files) <= set(state_files(tmp_path))
    with closing(Engine(model, **with_store(tmp_path))) as engine:
        found = engine.run(texts(), TOKENS)
        assert tokens(found) == expected
        assert [request.num_cached_tokens for request in found] == whole(found, 128)


@pytest.mark.parametrize(("written", "read"), [(128, 64), (64, 128)])
def test_blocks_of_another_size_find_states_where_theirs_end(
    model: Path, expected: list[list[int]], written: int, read: int, tmp_path: Path
) -> None:
    own = [texts()[0], texts()[4]]
    # Steps end where blocks of either size do, and states are kept there.
    steps = {"max_num_batched_tokens": 128, "prefix_cache_retention_interval": 128}
    with closing(Engine(model, **with_store(tmp_path, written), **steps)) as engine:
        for text in own:
            engine.run([text], 1)
    with closing(Engine(model, **with_store(tmp_path, read))) as engine:
        found = engine.run(own, TOKENS)
        assert tokens(found) == [expected[0], expected[4]]
        assert [request.num_cached_tokens for request in found] == whole(found, 128)


def test_requests_that_are_preempted_find_their_states_again(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    many = [text for text in texts() for _ in range(2)]
    with closing(Engine(model, kv_cache_dtype=INT8, enable_prefix_caching=False)) as engine:
        wanted = tokens(engine.run(many, 200))
    for _ in range(2):
        with closing(Engine(model, **with_store(tmp_path), **FEW)) as engine:
            assert tokens(engine.run(many, 200)) == wanted
            preempted = [x.value for x in engine.llm.get_metrics() if x.name == "vllm:num_preemptions"]
            assert sum(preempted) > 0
            loaded = counts(engine)["tokens_loaded"]
    assert loaded > 0


def test_what_keeps_no_states_behind_blocks_is_refused_at_start(tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    folder = random_model(tmp_path / "model", granite())
    arguments = {"model": folder, **on(tmp_path / "store"), "block_size": None}
    try:
        with pytest.raises(UnsupportedError, match="max_num_batched_tokens must be at most 256, a block"):
            Engine(**arguments)
        with pytest.raises(
            UnsupportedError, match="enable_prefix_caching must be True for a store of recurr"
        ):
            Engine(**arguments, enable_prefix_caching=False)
    finally:
        ensure_kv_transfer_shutdown()


@pytest.mark.parametrize(
    ("name", "ranks", "guesses"), [("tensor_parallel_size", 2, None), ("speculative_config", 1, "ngram")]
)
def test_ranks_and_guesses_are_refused(name: str, ranks: int, guesses: str | None) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    from kvloom.integrations.vllm.storing.recurrent import state_groups

    spec = MambaSpec(block_size=64, shapes=((2, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        speculative_config=guesses,
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["model.layers.0.conv"])
    with pytest.raises(UnsupportedError, match=f"{name} must be .* for a store of recurrent states, got"):
        state_groups(config, [group])
