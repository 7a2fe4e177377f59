"""Real engines: a cache of each continues in every other, 32 greedy tokens. Run by ``make test-engines``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from carry.models import HAS_LATENTS, prefilled, small, text
from torch import Tensor

from kvloom import load_model
from kvloom.carry import (
    CarriedCache,
    expect_first_layer,
    from_cache,
    geometry_of,
    llama_state,
    read_arrays,
    read_llama,
    read_mlx,
    to_cache,
    write_arrays,
    write_llama,
    write_mlx,
)
from kvloom.carry.mlx.writing import VERSIONS
from kvloom.models import bundled_model_path, corpus_files

ENGINES = Path(os.environ.get("KVLOOM_ENGINES", "build/engines")).absolute()
np = pytest.importorskip("numpy")
pytestmark = [
    pytest.mark.process,
    pytest.mark.model,
    pytest.mark.skipif(
        not (ENGINES / "llama/bin/python").exists(), reason="make test-engines installs engines"
    ),
]
NEW, HELD = 32, 300


@dataclass
class Given:
    """A model in a folder that engines read, and a prompt."""

    model: Any
    folder: Path
    ids: list[int]

    @property
    def held(self) -> list[int]:
        return self.ids[:-1]


@dataclass
class Said:
    """What an engine chose, and its scores."""

    tokens: list[int]
    logits: Tensor


def run(venv: str, script: str, given: Given, *, disabled: bool = False, **wanted: Any) -> Said:
    """A script of ``engines`` in the environment of an engine."""
    at = given.folder / f"request{len([*given.folder.glob('request*.json')])}.json"
    held = len(given.held)
    asked = {
        "folder": str(given.folder),
        "last": given.ids[-1],
        "start": held,
        "new": NEW,
        "tokens": given.held,
        **wanted,
    }
    if "load" not in wanted:
        asked["prompt"] = given.held
    at.write_text(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in asked.items()}))
    path = Path(__file__).parent / "engines" / f"{script}.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"LLAMA_ATTN_ROT_DISABLE": "1"} if disabled else {})
    env.pop("PYTHONPATH", None)
    found = subprocess.run(
        [ENGINES / venv / "bin/python", path, at], env=env, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    if script == "gguf_models":
        return Said([], torch.empty(0))
    said = np.load(f"{at}.npz")
    return Said(said["tokens"].tolist(), torch.from_numpy(said["logits"]))


def given_of(name: str, folder: Path) -> Given:
    """A model by name, saved for all engines; ``"bundled"`` is the trained one."""
    if name == "bundled":
        model, tokenizer = load_model(bundled_model_path(), torch.float32, progress=False)
        source = max((x.read() for x in corpus_files("heldout")), key=len)
        ids = tokenizer(source).input_ids[: HELD + 1]
    else:
        model, ids = small(name), text(61)[0].tolist()
    model.save_pretrained(folder)
    state = {k: v.float().numpy() for k, v in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    np.savez(folder / "weights.npz", **state)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where mlx-lm looks for it
        config["rope_theta"] = config["rotary_emb_base"] = rope["rope_theta"]
        config["partial_rotary_factor"] = config["rotary_pct"] = rope.get("partial_rotary_factor", 1.0)
    if rope.get("rope_type") == "yarn":
        config["rope_scaling"] = rope
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    given = Given(model, folder, ids)
    run("llama", "gguf_models", given)
    return given


@torch.no_grad()
def torch_goes_on(given: Given, cache: Any) -> Said:
    tokens, logits, token = [], [], given.ids[-1]
    for _ in range(NEW):
        logits.append(
            given.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0, -1]
        )
        token = int(logits[-1].argmax())
        tokens.append(token)
    return Said(tokens, torch.stack(logits))


def off(one: Said, other: Said) -> float:
    return float((one.logits - other.logits).abs().max())


# --- for each engine its own cache as CarriedCache, and how it goes on from another's ---------------------


class Llama:
    def __init__(
        self, kind: str = "f32", flash: bool = False, disabled: bool = False, form: str = "sequence"
    ) -> None:
        self.kind, self.flash, self.disabled, self.form = kind, flash, disabled, form
        self.rotated = None if kind != "q8_0" else not disabled
        self.name = f"llama.cpp {kind}{' flash' if flash else ''}{' unrotated' if disabled else ''} {form}"

    def ask(self, given: Given, **wanted: Any) -> Said:
        how = {"kind": self.kind, "flash": self.flash, "form": self.form}
        return run("llama", "llama_engine", given, disabled=self.disabled, **how, **wanted)

    def own(self, given: Given) -> tuple[CarriedCache, Said]:
        path = given.folder / "own.bin"
        said = self.ask(given, save=path)
        cache = read_llama(path, geometry_of(given.model), rotated=self.rotated, tokens=given.held)
        written = given.folder / "written.bin"
        if not any(x.window for x in cache.layers):  # of which a token more is kept than is seen
            self.write(given, cache, written)
            assert written.read_bytes()[8:] == path.read_bytes()[8:], "other bytes than llama.cpp's"
        return cache, said

    def write(self, given: Given, cache: CarriedCache, path: Path, rounding: bool = False) -> None:
        write_llama(
            cache, path, geometry_of(given.model), form=self.form, kind=self.kind, rotated=self.rotated,
            flash_attention=self.flash, rounding=rounding,
        )  # fmt: skip

    def other(self, given: Given, cache: CarriedCache) -> Said:
        path = given.folder / "other.bin"
        self.write(given, cache, path, rounding=self.kind != "f32")
        return self.ask(given, load=path)


class Mlx:
    def __init__(self, bits: int = 0, version: str = VERSIONS[0]) -> None:
        self.bits, self.version, self.name = bits, version, f"mlx-lm {version} {bits or 'float32'}"
        self.venv = "mlx" if version == VERSIONS[0] else f"mlx-{version}"

    def own(self, given: Given) -> tuple[CarriedCache, Said]:
        path = given.folder / f"own.{self.version}.safetensors"  # mapped, so never written again
        said = run(self.venv, "mlx_engine", given, save=path, bits=self.bits)
        return read_mlx(path, geometry_of(given.model), tokens=given.held), said

    def other(self, given: Given, cache: CarriedCache) -> Said:
        path = given.folder / "other.mlx.safetensors"
        keeps = not self.bits or cache.kinds[0].startswith("affine")
        write_mlx(cache, path, bits=0 if keeps else self.bits, rounding=not keeps, version=self.version)
        return run(self.venv, "mlx_engine", given, load=path, bits=self.bits)


class Onnx:
    def __init__(self, engine: str, interleaved: bool = False) -> None:
        self.engine, self.interleaved = engine, interleaved
        self.name = f"{engine}{' interleaved' if interleaved else ''}"

    def ask(self, given: Given, **wanted: Any) -> Said:
        return run("onnx", "onnx_engine", given, engine=self.engine, interleaved=self.interleaved, **wanted)

    @property
    def pairs(self) -> str:
        return "adjacent" if self.interleaved else "halves"

    def own(self, given: Given) -> tuple[CarriedCache, Said]:
        path = given.folder / "own.npz"
        said = self.ask(given, save=path)
        held = np.load(path)
        arrays = {x: torch.from_numpy(held[x]) for x in held.files}
        cache = read_arrays(
            arrays, self.engine, geometry_of(given.model), pairs=self.pairs, tokens=given.held
        )
        return cache, said

    def other(self, given: Given, cache: CarriedCache) -> Said:
        names = [(f"past.{i}.key", f"past.{i}.value") for i in range(len(cache.layers))]
        arrays = write_arrays(
            cache, self.engine, geometry_of(given.model), names=names, kind="float32", pairs=self.pairs
        )
        path = given.folder / "other.npz"
        np.savez(path, **{k: x.numpy() for k, x in arrays.items()})
        return self.ask(given, load=path)


class Executorch:
    """A program whose buffers have room behind the tokens."""

    name, slots = "executorch", 384

    def own(self, given: Given) -> tuple[CarriedCache, Said]:
        path = given.folder / "own.pte.npz"
        said = run("executorch", "executorch_engine", given, save=path)
        arrays = {k: torch.from_numpy(x) for k, x in np.load(path).items()}
        held = given.held
        return read_arrays(
            arrays, self.name, geometry_of(given.model), num_tokens=len(held), tokens=held
        ), said

    def other(self, given: Given, cache: CarriedCache) -> Said:
        names = [(f"k_cache.{i}", f"v_cache.{i}") for i in range(len(cache.layers))]
        arrays = write_arrays(cache, self.name, geometry_of(given.model), names=names, slots=self.slots)
        path = given.folder / "other.pte.npz"
        np.savez(path, **{k: x.numpy() for k, x in arrays.items()})
        return run("executorch", "executorch_engine", given, load=path)


class Torch:
    name = "kvloom"

    def own(self, given: Given) -> tuple[CarriedCache, Said]:
        cache = prefilled(given.model, torch.tensor([given.held]))
        return from_cache(cache, given.model, given.held), torch_goes_on(given, cache)

    def other(self, given: Given, cache: CarriedCache) -> Said:
        return torch_goes_on(given, to_cache(cache, given.model))


EXACT = [
    Torch(), Llama(), Mlx(), Mlx(0, VERSIONS[1]), Onnx("openvino"), Onnx("onnxruntime"),
    Onnx("onnxruntime", True), Executorch(),
]  # fmt: skip


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return given_of("bundled", tmp_path_factory.mktemp("bundled"))


def test_float32_continues_everywhere(bundled: Given, capsys: pytest.CaptureFixture[str]) -> None:
    """Every ordered pair: all tokens, and scores within twice the difference of the engines' own."""
    owns = {x.name: x.own(bundled) for x in EXACT}
    wrong, lines = [], []
    for source in EXACT:
        cache, said = owns[source.name]
        expect_first_layer(cache, bundled.model)
        for target in EXACT:
            own = owns[target.name][1]
            found = target.other(bundled, cache)
            same = sum(x == y for x, y in zip(found.tokens, own.tokens, strict=True))
            far, allowed = off(found, own), 2 * max(off(said, own), 1e-5)
            lines.append(f"{source.name:26} {target.name:26} {same:3} {far:.1e} own {off(said, own):.1e}")
            if same != NEW or far > allowed:
                wrong.append(lines[-1])
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert not wrong


ROUNDED = [
    Llama(flash=True), Llama("f16"), Llama("f16", flash=True), Llama("q8_0", True), Llama("q8_0", True, True),
    Llama("bf16"), Llama(form="context"), Llama(form="state"), Mlx(8), Mlx(4),
    Mlx(8, VERSIONS[1]), Mlx(4, VERSIONS[1]),
]  # fmt: skip


@pytest.mark.parametrize("engine", ROUNDED, ids=lambda x: x.name)
def test_rounded_caches_come_back(bundled: Given, engine: Any) -> None:
    """An engine's own cache through this library has the engine's bits, and kvloom goes on from it."""
    cache, said = engine.own(bundled)
    expect_first_layer(cache, bundled.model)
    again = engine.other(bundled, cache)
    assert again.tokens == said.tokens
    assert torch.equal(again.logits, said.logits)
    if not engine.name.endswith(" 4"):  # whose new tokens have 4 bits, too, in mlx-lm alone
        assert torch_goes_on(bundled, to_cache(cache, bundled.model)).tokens == said.tokens
    through = engine.other(bundled, from_cache(to_cache(cache, bundled.model), bundled.model, bundled.held))
    if engine.name.startswith("llama.cpp"):
        assert torch.equal(through.logits, said.logits)


NAMES = [
    "qwen2", "gemma3", "gpt2", "yarn", "phi", "stablelm", "neox", "glm",
    *(["deepseek"] if HAS_LATENTS else []),
]  # fmt: skip
IN_MLX = ("qwen2", "gemma3", "yarn", "phi", "stablelm", "neox", "deepseek")
"""Those whose names of weights and numbers mlx-lm has."""


@pytest.mark.parametrize("name", NAMES)
def test_other_architectures_continue(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Biases, windows, no RoPE, latents, YaRN and partial RoPE: of llama.cpp, and of mlx-lm."""
    given = given_of(name, tmp_path)
    others: list[Any] = [Torch(), Llama(), *([Mlx()] if name in IN_MLX else [])]
    others += [Onnx("openvino"), Onnx("onnxruntime")] if name == "qwen2" else []
    owns = {x.name: x.own(given) for x in others}
    for source in others:
        cache, said = owns[source.name]
        expect_first_layer(cache, given.model)
        for target in others:
            own = owns[target.name][1]
            found = target.other(given, cache)
            with capsys.disabled():
                line = f"{name} {source.name} {target.name} {off(found, own):.1e} own {off(said, own):.1e}"
                sys.stdout.write(f"\n{line}")
            assert found.tokens == own.tokens
            assert off(found, own) <= 2 * max(off(said, own), 1e-4)


def test_memory_is_enough(bundled: Given) -> None:
    """Bytes in memory are those of a file of form state."""
    cache = Torch().own(bundled)[0]
    path = bundled.folder / "state.bin"
    write_llama(cache, path, geometry_of(bundled.model), form="state")
    assert llama_state(cache, geometry_of(bundled.model)) == path.read_bytes()
