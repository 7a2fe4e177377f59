"""Settings of torch that change keys and values are a part of what pages are found by; others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from integrations.models.test_families import SMALL
from oracles.changes import put
from oracles.stateful_models import stateful_model
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from kvloom import continuous_batching
from kvloom.errors import StateError
from kvloom.integrations.transformers import KVCache, KVPool, disable, enable
from kvloom.integrations.transformers.fingerprint.context import Context
from kvloom.integrations.transformers.fingerprint.watch import ModelWatch
from kvloom.integrations.transformers.models.cache_argument import as_argument
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.integrations.transformers.versions import IS_4
from kvloom.store import KVStore

Setting = Callable[[], AbstractContextManager[Any]]
OTHER = torch.randint(5, 98, (1, 70), generator=torch.Generator().manual_seed(1))
DTYPES = "bfloat16", "float16"
TEXT = torch.randint(5, 98, (1, 70), generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{x}") for x in ("TF32 acceleration on top", "Anomaly Detection")
]


@contextmanager
def called(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def precisions() -> Iterator[None]:
    """Context that restores the precisions of both of torch's ways to set them."""
    read = torch._C._get_fp32_precision_getter
    names = [
        ("generic", "all"),
        *((x, y) for x in ("mkldnn", "cuda") for y in ("all", "matmul", "conv", "rnn")),
    ]
    before = {name: read(*name) for name in names}
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for name, value in before.items():
            torch._C._set_fp32_precision_setter(*name, value)


@contextmanager
def precision(owner: Any, value: str) -> Iterator[None]:
    with precisions():
        owner.fp32_precision = value
        yield


@contextmanager
def products(value: str) -> Iterator[None]:
    with precisions():
        torch.set_float32_matmul_precision(value)
        yield


@contextmanager
def nested() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        yield


def flags(name: str, value: bool) -> Setting:
    return lambda: torch.backends.mkldnn.flags(**{"enabled": True, name: value})


class OfFunctions(TorchFunctionMode):
    """A mode of somebody's, in which linear layers give more."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.5 if func is torch.nn.functional.linear else found


class OfOperators(TorchDispatchMode):
    """The same of products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return found * 1.5 if is_product else found


@contextmanager
def another_operator() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes the place of torch's
        library.impl("silu", torch.relu, "CPU")
    try:
        yield
    finally:
        library._destroy()


SETTINGS: dict[str, Setting] = {
    "a mode of functions": OfFunctions,
    "a mode of operators": OfOperators,
    "another operator": another_operator,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "products in medium precision": lambda: products("medium"),
    "products in high precision": lambda: products("high"),
    "products of oneDNN in bfloat16": lambda: precision(torch.backends.mkldnn.matmul, "bf16"),
    "products of oneDNN in tf32": lambda: precision(torch.backends.mkldnn.matmul, "tf32"),
    "convolutions of oneDNN in bfloat16": lambda: precision(torch.backends.mkldnn.conv, "bf16"),
    "all of oneDNN in bfloat16": lambda: precision(torch.backends.mkldnn, "bf16"),
    "all in tf32": lambda: precision(torch.backends, "tf32"),
    "no oneDNN": flags("enabled", False),
    "oneDNN deterministic": flags("deterministic", True),
    "no NNPACK": lambda: torch.backends.nnpack.flags(enabled=False),
    "attention by products": lambda: sdpa_kernel(SDPBackend.MATH),
    "attention by the flash kernel": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    "sums of products of halves": lambda: called(
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False
    ),
    "default dtype float64": lambda: called(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic algorithms": lambda: called(torch.use_deterministic_algorithms, True, False),
    "denormals flushed": lambda: called(torch.set_flush_denormal, True, False),
    "no fast path": lambda: called(torch.backends.mha.set_fastpath_enabled, False, True),
}
WITHOUT_EFFECT: dict[str, Setting] = {
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "autocast turned off": lambda: torch.autocast("cpu", enabled=False),
    "autocast of another device": lambda: torch.autocast("mps", torch.float16),
    "nested autocast turned off": nested,
    "a default device": lambda: torch.device("cpu"),
    "precision of CUDA's products": lambda: precision(torch.backends.cuda.matmul, "tf32"),
    "precision of cuDNN": lambda: precision(torch.backends.cudnn, "tf32"),
    "halves of CUDA's products": lambda: put(
        torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
    ),
    "cuDNN's choice": lambda: put(torch.backends.cudnn, "benchmark", True),
    "attention of CUDA": lambda: called(torch.backends.cuda.enable_mem_efficient_sdp, False, True),
    "anomalies": torch.autograd.detect_anomaly,
    "no memory filled": lambda: put(torch.utils.deterministic, "fill_uninitialized_memory", False),
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen3_next":
        return stateful_model(name)
    config, differs, dtype = {
        "GPT-2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, torch.float32),
        "OPT": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}, torch.float32),
        "Llama in bfloat16": ("LlamaConfig", {}, torch.bfloat16),
        "Llama": ("LlamaConfig", {"hidden_size": 256, "intermediate_size": 512}, torch.float32),
    }[name]
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**SMALL | differs)).to(dtype).eval()


STATEFUL = [] if IS_4 else ["qwen3_next"]  # whose caches keep no such states
MODELS = pytest.mark.parametrize("name", ["GPT-2", "OPT", "Llama in bfloat16", "Llama", *STATEFUL])


def kept(model: Any) -> list[Tensor]:
    """Keys and values of a text, of the second of two pieces too."""
    cache = DynamicCache(config=model.config)
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        for piece in TEXT.split(64, 1):
            model(piece, **as_argument(model, cache))
    layers = (x for x in cache.layers if getattr(x, "keys", None) is not None)
    return [x.detach() for layer in layers for x in (layer.keys, layer.values)]


def are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    return all(
        x.dtype == y.dtype and torch.equal(bits(x), bits(y)) for x, y in zip(some, others, strict=True)
    )


@MODELS
def test_a_setting_that_changes_a_bit_is_a_state_of_its_own(name: str) -> None:
    model = model_of(name)
    watch = ModelWatch(model)
    with torch.no_grad():
        expected = kept(model)
        changing = set()
        for setting, enter in SETTINGS.items():
            with enter():
                if not are_same(kept(model), expected):
                    changing.add(setting)
                    assert watch.state() == watch.quick_state() != "", setting
                    assert Context({"cpu"}).text() != "", setting
            assert watch.quick_state() == watch.state() == "", setting
        assert are_same(kept(model), expected)
    assert {"autocast to float16", "a mode of operators"} <= changing
    assert {"a mode of functions", "another operator"} <= changing or name != "Llama"
    assert Context({"cpu", "cuda"}).text() == ""


def test_operators_are_told_apart_that_are_as_many() -> None:
    libraries = [torch.library.Library("aten", "IMPL") for _ in range(2)]
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library, name in zip(libraries, ("silu", "tanh"), strict=True):
            library.impl(name, torch.relu, "CPU")
            found.append(Context({"cpu"}).text())
            library._destroy()
    assert found[0] != found[1]
    assert "" not in found
    assert Context({"cpu"}).text() == ""


def test_settings_of_another_device_are_named_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of the CPU can try those of CUDA; each has a name, and a value that is compared."""
    cuda, cpu = Context({"cuda"}), Context({"cpu"})
    names = (
        "precision of CUDA's products",
        "halves of CUDA's products",
        "cuDNN's choice",
        "attention of CUDA",
    )
    for name in names:
        before = cuda.values()
        with WITHOUT_EFFECT[name]():
            assert cuda.values() != before
            assert cuda.text() != cpu.text() == ""
        assert cuda.values() == before
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: "another")
    assert cuda.text() == "cuda library another"


@MODELS
def test_a_setting_without_effect_finds_what_was_computed(name: str) -> None:
    model = model_of(name)
    watch = ModelWatch(model)
    with torch.no_grad():
        expected = kept(model)
    for setting, enter in WITHOUT_EFFECT.items():
        with torch.no_grad(), enter():
            assert watch.state() == "", setting
            assert are_same(kept(model), expected), setting


def ask(model: Any, pool: KVPool, ids: Tensor = TEXT) -> int:
    """Number of found tokens of a text that is computed and committed."""
    cache = pool.begin(ids)
    found = int(cache.get_seq_length())
    with torch.no_grad():
        model(ids[:, found:], **as_argument(model, cache))
    pool.commit(cache, ids)
    return found


@pytest.mark.parametrize("name", ["GPT-2", "OPT"])
def test_pages_are_found_in_their_own_autocast(name: str) -> None:
    model = model_of(name)
    casts = [WITHOUT_EFFECT["autocast turned off"], *(SETTINGS[f"autocast to {x}"] for x in DTYPES)]
    for cast in casts:
        pool = KVPool.for_model(model, max_tokens=512, page_size=4)
        with cast():
            assert [ask(model, pool), ask(model, pool)] == [0, 68]
        for other in casts:
            with other():
                cache = pool.begin(TEXT)
            assert cache.get_seq_length() == (68 if other is cast else 0)
            if other is not cast or cast is casts[0]:
                continue
            with (
                torch.no_grad(),
                pytest.raises(StateError, match=r"or settings of torch, and in the torch\.autocast"),
            ):
                model(TEXT[:, 68:], **as_argument(model, cache))


def test_pages_are_of_the_autocast_of_their_forwards() -> None:
    model = model_of("GPT-2")
    pool = KVPool.for_model(model, max_tokens=512, page_size=4)
    cache = pool.begin(TEXT)
    with SETTINGS["autocast to bfloat16"](), torch.no_grad():
        model(TEXT, **as_argument(model, cache))
    pool.commit(cache, TEXT)  # whatever the settings are now
    assert pool.begin(TEXT).get_seq_length() == 0
    with SETTINGS["autocast to bfloat16"]():
        assert pool.begin(TEXT).get_seq_length() == 68
        cache = pool.begin(TEXT)
    with SETTINGS["autocast to bfloat16"](), torch.no_grad():
        model(TEXT[:, 68:69], **as_argument(model, cache))
    with torch.no_grad(), SETTINGS["autocast without cache"]():
        model(TEXT[:, 69:], **as_argument(model, cache))
    pool.commit(cache, TEXT)


def test_a_store_tells_settings_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("GPT-2")
    plain = fingerprint_of(model, "int8")
    with torch.autocast("cpu", torch.bfloat16):
        cast = fingerprint_of(model, "int8")
    assert cast.context == "autocast of cpu to torch.bfloat16"
    assert "context" not in plain.to_json()
    with products("medium"):
        assert plain.difference(fingerprint_of(model, "int8")) == "context is mkldnn products bf16, not "

    def asked(setting: Setting, ids: Tensor = TEXT) -> int:
        with KVStore(f"file://{tmp_path}", read="always") as store, setting():
            return ask(model, KVPool.for_model(model, "int8", max_tokens=512, page_size=4, store=store), ids)

    for expected in (0, 68):
        for name in ("autocast to bfloat16", "autocast to float16", "autocast turned off"):
            assert asked((SETTINGS | WITHOUT_EFFECT)[name]) == expected
    with KVStore(f"file://{tmp_path}", read="always") as store:
        pool = KVPool.for_model(model, "int8", max_tokens=512, page_size=4, store=store)
        cache = pool.begin(OTHER)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(OTHER, **as_argument(model, cache))
        pool.commit(cache, OTHER)
    assert "commit within them" in caplog.text
    assert [asked(x, OTHER) for x in (WITHOUT_EFFECT["anomalies"], SETTINGS["autocast to bfloat16"])] == [
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("setting", "when"),
    [
        ("all in tf32", "after"),
        ("products of oneDNN in bfloat16", "before"),
        ("precision of CUDA's products", "after"),
        ("products in high precision", "before"),
    ],
)
def test_every_door_takes_precisions_of_either_api(setting: str, when: str) -> None:
    model = model_of("Llama")
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    enter = (SETTINGS | WITHOUT_EFFECT)[setting]
    if when == "after":
        pool = KVPool.for_model(model, "int8", max_tokens=512)
        ask(model, pool)
    with enter():
        if when == "before":
            pool = KVPool.for_model(model, "int8", max_tokens=512)
        known = when == "after" and setting in WITHOUT_EFFECT
        assert [ask(model, pool), ask(model, pool)] == [64 if known else 0, 64]
        own = model.generate(TEXT, **as_argument(model, KVCache.for_model(model, "int8")), **options)
        enable(model, "int8")
        assert torch.equal(model.generate(TEXT, **options), own)
        disable(model)
        if not IS_4:
            continuous_batching(model)
            assert len(model.generate_batch(TEXT.tolist(), max_new_tokens=2, progress_bar=False)) == 1
            continuous_batching(model, None)
