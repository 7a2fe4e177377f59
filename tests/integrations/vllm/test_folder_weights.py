"""A folder's digest is that of the model that transformers loads from it, and takes little memory."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.pool.identity import weights_digest

pytest.importorskip("transformers", minversion="5.19", reason="vLLM needs it")
pytest.importorskip("xxhash")

from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from kvloom.integrations.vllm.storing import folder_weights
from kvloom.integrations.vllm.storing.folder_weights import folder_digest

pytestmark = pytest.mark.filterwarnings("ignore")

TINY = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **TINY, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def qwen3_next() -> Any:
    linear = {
        "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
    }  # fmt: skip
    return Qwen3NextConfig(**{**TINY, "num_hidden_layers": 4}, **EXPERTS, **linear, head_dim=16)


DENSE: list[tuple[str, Callable[[], Any]]] = [
    ("llama", lambda: LlamaConfig(**TINY)),
    ("tied", lambda: LlamaConfig(**{**TINY, "tie_word_embeddings": True})),
    # Its files have what its modules have.
    ("gpt_oss", lambda: GptOssConfig(**TINY, head_dim=16, num_local_experts=4, num_experts_per_tok=2)),
]
IN_PARTS: list[tuple[str, Callable[[], Any]]] = [
    ("mixtral", lambda: MixtralConfig(**TINY, num_local_experts=4)),
    ("qwen3_moe", lambda: Qwen3MoeConfig(**TINY, **EXPERTS)),
    ("qwen3_next", qwen3_next),
    ("deepseek_v2", lambda: DeepseekV2Config(**LATENT)),
    ("deepseek_v3", lambda: DeepseekV3Config(**LATENT)),
]


def saved(folder: Path, config: Any) -> Path:
    """A model of random weights, buffers too, by ``save_pretrained``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.state_dict().values():
        weight.normal_()
    model.save_pretrained(folder)
    return folder


def with_weights(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A model whose file has other weights."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def digest(folder: Path, dtype: torch.dtype = torch.float32, kind: Any = None) -> str:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        kind = kind or type(AutoModelForCausalLM.from_config(config))
    return folder_digest(kind, config, dtype, sorted(folder.glob("*.safetensors")))


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    return weights_digest(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("mixture"), Qwen3MoeConfig(**TINY, **EXPERTS))


EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def one_element(weights: dict[str, torch.Tensor]) -> None:
    weights[EXPERT.format(2, "down")][3, 5] += 1


def swap(weights: dict[str, torch.Tensor], one: str, other: str) -> None:
    weights[one], weights[other] = weights[other], weights[one]


def experts(weights: dict[str, torch.Tensor]) -> None:
    for part in ("gate", "up", "down"):
        swap(weights, EXPERT.format(0, part), EXPERT.format(3, part))


def gate_and_up(weights: dict[str, torch.Tensor]) -> None:
    for i in range(4):
        swap(weights, EXPERT.format(i, "gate"), EXPERT.format(i, "up"))


@pytest.mark.parametrize(("name", "config"), [*DENSE, *IN_PARTS], ids=[*dict(DENSE), *dict(IN_PARTS)])
def test_a_folder_has_the_digest_of_what_transformers_loads(
    name: str, config: Callable[[], Any], tmp_path: Path
) -> None:
    folder = saved(tmp_path, config())
    in_parts = [x for x in load_file(folder / "model.safetensors") if re.search(r"\.experts\.\d+\.", x)]
    assert bool(in_parts) == (name in dict(IN_PARTS))
    found = [digest(folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == [loaded(folder, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert len(set(found)) == 3


def test_what_experts_are_is_in_the_digest(mixture: Path, tmp_path: Path) -> None:
    changes = [one_element, experts, gate_and_up]
    folders = [with_weights(mixture, tmp_path / change.__name__, change) for change in changes]
    found = [digest(folder) for folder in (mixture, *folders)]
    assert len(set(found)) == 4
    assert found == [loaded(folder) for folder in (mixture, *folders)]


def test_weights_that_the_model_does_not_have_change_nothing(mixture: Path, tmp_path: Path) -> None:
    more = {"model.layers.2.mlp.gate.weight": torch.ones(3), "mtp.norm.weight": torch.ones(4)}
    assert digest(with_weights(mixture, tmp_path / "more", lambda x: x.update(more))) == digest(mixture)


def test_one_of_two_that_are_tied_or_both_may_be_saved(tmp_path: Path) -> None:
    tied = saved(tmp_path / "tied", dict(DENSE)["tied"]())
    inner, outer = "model.embed_tokens.weight", "lm_head.weight"
    other = with_weights(tied, tmp_path / "other", lambda x: x.update({outer: x.pop(inner)}))
    same = with_weights(tied, tmp_path / "same", lambda x: x.update({outer: x[inner].clone()}))
    apart = with_weights(tied, tmp_path / "apart", lambda x: x.update({outer: x[inner] + 1}))
    found = [digest(folder) for folder in (tied, other, same, apart)]
    assert found == [loaded(folder) for folder in (tied, other, same, apart)]
    assert len(set(found[:3])) == 1 and found[3] != found[0]


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        (r"^model\.norm", "must have all weights of its configuration .* got none for model.norm.weight"),
        (r"layers\.1\.mlp\.experts", r"got none for model\.layers\.1\.mlp\.experts\.gate_up_proj"),
        (r"layers\.1\.mlp\.experts\.3\.", "must be one that transformers loads .* got RuntimeError"),
        (r"layers\.1\.mlp\.experts\.3\.gate", "must be one that transformers loads .* got RuntimeError"),
        (r"layers\.1\.mlp\.experts\.\d\.up", "must be one that transformers loads .* got RuntimeError"),
    ],
    ids=["norm", "experts", "expert", "part", "parts"],
)
def test_a_folder_that_lacks_a_weight_is_refused(
    lacking: str, message: str, mixture: Path, tmp_path: Path
) -> None:
    def remove(weights: dict[str, torch.Tensor]) -> None:
        for name in [x for x in weights if re.search(lacking, x)]:
            del weights[name]

    with pytest.raises(UnsupportedError, match=message):
        digest(with_weights(mixture, tmp_path / "lacking", remove))


def test_weights_are_read_when_they_are_wanted_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, LlamaConfig(**TINY))
    read, ahead = [], []
    open_file, sum_of = folder_weights.safe_open, folder_weights.weight_sum

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def __getitem__(self, index: Any) -> torch.Tensor:
            read.append(self.name)
            return self.inner[index]

    @contextmanager
    def opened(file: Path, framework: str) -> Iterator[Any]:
        with open_file(file, framework) as inner:
            yield SimpleNamespace(keys=inner.keys, get_slice=lambda name: Slice(name, inner.get_slice(name)))

    def sum_and_count(name: str, weight: torch.Tensor) -> bytes:
        ahead.append(len(read) - len(ahead))
        return sum_of(name, weight)

    monkeypatch.setattr(folder_weights, "safe_open", opened)
    monkeypatch.setattr(folder_weights, "weight_sum", sum_and_count)
    assert digest(folder) == loaded(folder)
    assert ahead == [1] * len(load_file(folder / "model.safetensors"))


def test_a_loader_that_fails_is_refused_and_leaves_nothing_behind(mixture: Path) -> None:
    made: list[torch.nn.Linear] = []

    def make() -> None:
        made.append(torch.nn.Linear(2, 3))

    class Kind:
        @staticmethod
        def from_pretrained(*arguments: Any, **options: Any) -> Any:
            make()
            (other := Thread(target=make)).start()
            other.join()
            raise TypeError("state_dict must have tensors")

    before = dict(os.environ)
    with pytest.raises(UnsupportedError, match="got TypeError\\('state_dict must have tensors'\\)"):
        digest(mixture, kind=Kind)
    make()
    # What the loader makes is empty; what another thread makes meanwhile, or this one later, is not.
    assert [layer.weight.is_meta for layer in made] == [True, False, False]
    assert dict(os.environ) == before
