"""Every example runs, and what it prints is what transformers' own cache gives."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
PROMPT = "import os\n\ndef main():\n"


def printed_by_itself(path: Path) -> str:
    """Standard output of an example in a process of its own, in which no warning is let pass."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def bundled() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    pytest.importorskip("transformers")
    from kvloom.integrations.transformers import load_model
    from kvloom.models import bundled_model_path

    return load_model(bundled_model_path(), dtype=torch.float32, progress=False)


def stock_text(prompts: list[str], num_new: int, past: Any = None, prefix: str = "") -> list[str]:
    """Texts that ``generate`` gives with transformers' own cache, ``prefix`` tokenized on its own."""
    from transformers import DynamicCache

    model, tokenizer = bundled()
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    if prefix:
        first = tokenizer([prefix], return_tensors="pt")
        inputs = {name: torch.cat([first[name], inputs[name]], dim=1) for name in first}
    past = DynamicCache(config=model.config) if past is None else past
    out = model.generate(**inputs, past_key_values=past, max_new_tokens=num_new, do_sample=False)
    return list(tokenizer.batch_decode(out, skip_special_tokens=True))


def check_generation_loop(text: str) -> None:
    steps, *texts = text.split("\n\n", 1)
    lengths = re.findall(r"step \d reads positions (\d+) to (\d+), mask \(2, (\d+)\)", steps)
    assert lengths == [("0", "10", "11"), ("11", "11", "12"), ("12", "12", "13")]
    expected = stock_text([PROMPT, "class Reader:\n    def __init__(self, "], 24)
    assert texts == ["\n\n".join(expected) + "\n"]


def check_legacy_format(text: str) -> None:
    shapes, same, refilled, empty = text.splitlines()
    assert shapes == "5 layers, keys (1, 2, 12, 64), values (1, 2, 12, 64)"
    assert same == "same tensors after a round trip: True"
    expected = repr(stock_text([PROMPT], 4 + 16)[0])
    assert refilled == f"from 9 tokens of the tuple: {expected}"
    assert empty == f"from an empty cache: {expected}"


def check_carry_to_llama_cpp(text: str) -> None:
    size, checked, answer = text.splitlines()
    count = len(bundled()[1](PROMPT).input_ids) - 1
    # Keys and values of 5 layers with 2 heads of 64 in float32, a cell and an id of each token, and headers.
    nbytes = count * (5 * 2 * 2 * 64 * 4 + 12 + 4) + 12 + 16 + 5 * 2 * 12
    assert size == f"{count} tokens, {nbytes:,} bytes for llama_state_seq_load_file"
    assert float(checked.split()[4]) < 1e-5
    assert answer == f"from the file: {stock_text([PROMPT], 16)[0]!r}"


def check_update_and_attend(text: str) -> None:
    found = re.findall(r"(\w+): largest difference (\S+), (\S+) bytes after 40 tokens\n", text)
    difference = {name: float(value) for name, value, _ in found}
    nbytes = {name: int(count.replace(",", "")) for name, _, count in found}
    assert list(difference) == ["dynamic", "int8", "window"]
    assert max(difference["dynamic"], difference["window"]) < 1e-5 < difference["int8"] < 0.1
    # 40 tokens of 2 sequences, 2 heads and 3 layers, keys and values; of the window twice its 8 at most.
    assert 40 * 12 * 2 * (64 + 2) <= nbytes["int8"] < nbytes["dynamic"] / 3
    assert nbytes["window"] <= 2 * 8 * 12 * 2 * 64 * 4 < 40 * 12 * 2 * 64 * 4 <= nbytes["dynamic"]


def check_drop_in(text: str) -> None:
    from oracles.language_models import FakeQuantCache

    past = FakeQuantCache()
    past.group = 64
    body, costs = text.rsplit("\n\n", 1)
    assert body == stock_text([PROMPT], 32, past)[0]
    # Keys and values of 5 layers with 2 heads of 64: codes and a scale of 2 bytes, or 4 bytes an element.
    plain, codes = 5 * 2 * 2 * 64 * 4, 5 * 2 * 2 * (64 + 2)
    assert costs == f"int8: {codes:,} bytes per token, float32: {plain:,}\n"


def check_prefix_reuse(text: str) -> None:
    system = '"""Utilities for reading and writing files."""\n\nimport os\nimport sys\n\n'
    *answers, length, refusal = text.splitlines()
    for line, (question, num_read) in zip(
        answers, {"def main": 2, "class Reader": 3, "def read_lines(path": 6}.items(), strict=True
    ):
        answer = stock_text([question], 16, prefix=system)[0].removeprefix(system + question)
        assert line == f"{question!r} ({num_read} tokens read): {answer!r}"
    assert length == "the prefix holds 21 tokens, and this is what a write meets:"
    assert "frozen" in refusal


def check_packed_loop(text: str) -> None:
    system = '"""Utilities for reading and writing files."""\n\nimport os\nimport sys\n\n'
    _, tokenizer = bundled()
    *answers, costs = text.splitlines()
    questions = ["def main", "class Reader", "def read_lines(path", "class Writer:\n    def"]
    lengths = [len(tokenizer(system + question).input_ids) for question in questions]
    for line, question in zip(answers, questions, strict=True):
        expected = stock_text([system + question], 12)[0].removeprefix(system + question)
        assert line == f"{question!r}: {expected!r}"
    found = 3 * ((min(lengths) - 1) // 16 * 16)  # whole pages
    computed = sum(lengths) - found + 4 * 11
    assert re.fullmatch(
        rf"{computed} tokens computed in \d+ forwards, {found} found in the pages of others", costs
    )


def check_eviction(text: str) -> None:
    kept, *rows = text.splitlines()
    counts = [432, 366, 300, 234, 168]
    assert kept == f"of 480 tokens layers keep {counts}"
    # Of a token 2 heads of 64, keys and values: 4 bytes an element, or codes and a scale of 2 bytes.
    nbytes = {"float32": 2 * 2 * 64 * 4, "int8": 2 * 2 * (64 + 2), "int4,recent=0": 2 * 2 * (32 + 2)}
    losses = {}
    for (kv, size), row in zip(nbytes.items(), rows, strict=True):
        found = re.fullmatch(
            r"(\S+) +all tokens: +(\S+) bytes, loss (\S+)  evicted: +(\S+) bytes, loss (\S+)", row
        )
        assert found is not None
        name, whole, loss, evicted, evicted_loss = found.groups()
        assert (name, whole) == (kv, f"{5 * 480 * size:,}")
        assert evicted == f"{sum(-(-n // 16) * 16 for n in counts) * size:,}"  # in whole pages
        losses[kv] = float(loss), float(evicted_loss)
    assert max(max(pair) for pair in losses.values()) < losses["float32"][0] + 0.3
    assert losses["float32"] == pytest.approx(stock_losses(counts), abs=0.006)


def stock_losses(counts: list[int]) -> tuple[float, float]:
    """What the example prints of a ``DynamicCache``, and of one of which each layer keeps so many tokens."""
    from transformers import DynamicCache

    model, tokenizer = bundled()
    ids = tokenizer(inspect.getsource(textwrap), return_tensors="pt").input_ids[:, : 480 + 64]
    found = []
    for is_evicted in (False, True):
        past, logits = DynamicCache(config=model.config), []
        with torch.no_grad():
            model(ids[:, :480], past_key_values=past)
            for layer, count in zip(past.layers, counts if is_evicted else (), strict=is_evicted):
                norms = layer.keys.norm(dim=-1)
                norms[:, :, -32:] = 0
                where = norms.argsort(dim=-1)[:, :, :count, None].expand(-1, -1, -1, 64)
                layer.keys, layer.values = layer.keys.gather(2, where), layer.values.gather(2, where)
            for i in range(480, 480 + 63):
                position = torch.tensor([[i]])
                logits.append(model(ids[:, i : i + 1], position_ids=position, past_key_values=past).logits[0])
        found.append(float(torch.nn.functional.cross_entropy(torch.cat(logits), ids[0, 481:])))
    return found[0], found[1]


CHECKS: dict[str, Callable[[str], None]] = {
    "carry_to_llama_cpp": check_carry_to_llama_cpp,
    "drop_in": check_drop_in,
    "eviction": check_eviction,
    "generation_loop": check_generation_loop,
    "legacy_format": check_legacy_format,
    "packed_loop": check_packed_loop,
    "prefix_reuse": check_prefix_reuse,
    "update_and_attend": check_update_and_attend,
}
NEEDS_TORCH_ONLY = ("update_and_attend",)


def test_every_example_has_a_check() -> None:
    assert sorted(CHECKS) == [path.stem for path in SCRIPTS]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_example_prints_what_it_should(path: Path) -> None:
    if path.stem not in NEEDS_TORCH_ONLY:
        bundled()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    CHECKS[path.stem](out.getvalue())


def test_an_example_runs_by_itself() -> None:
    bundled()
    check_drop_in(printed_by_itself(EXAMPLES / "drop_in.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.stem)
def test_docstring_says_how_to_run_it_and_readme_names_it(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert f"\n    python examples/{path.name}\n" in source.split('"""')[1]
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_an_example_for_torch_needs_nothing_else() -> None:
    for name in NEEDS_TORCH_ONLY:
        imports = re.findall(r"^(?:from|import) (\S+)", (EXAMPLES / f"{name}.py").read_text(), re.MULTILINE)
        assert {x.split(".")[0] for x in imports} == {"torch", "kvloom"}
        assert "kvloom.integrations.transformers" not in imports
