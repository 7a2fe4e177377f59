"""The command line as a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.ops import cpu_kernels, cuda_kernels


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvloom`` in a process of its own."""
    command = [sys.executable, "-c", "import sys; from kvloom.cli import main; sys.exit(main())", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_info_names_version_backends_capability_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in (
        "kvloom",
        "torch",
        "backends",
        "reference",
        f"cpu ({cpu_kernels()})",
        f"on CUDA        {cuda_kernels()}",
        "cpu capability",
        "devices",
    ):
        assert word in out


def test_generate_continues_the_prompt_the_same_in_a_float32_cache_and_without_one() -> None:
    prompt = "def load(path):\n    "
    done = run("generate", "--prompt", prompt, "--kv", "float32", "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    import torch

    from kvloom.integrations.transformers import load_model
    from kvloom.models import bundled_model_path

    model, tokenizer = load_model(bundled_model_path(), torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert done.stdout == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert "12 tokens in" in done.stderr


def test_generate_reads_a_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n", encoding="utf-8")
    arguments = ["generate", "--prompt-file", str(file), "--kv", "int4", "--quant-group", "32"]
    assert main([*arguments, "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("import os\n")
    assert "int4 cache" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "x", "--model", "/nowhere"], "model must be a local folder"),
        (["--prompt", "x", "--kv", "int8", "--quant-group", "48"], "quant_group must divide the head dim 64"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--prompt", ""], "--prompt must hold at least one token"),
        (["--prompt-file", "/nowhere/prompt.txt"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_prompt_and_prompt_file_exclude_each_other() -> None:
    done = run("generate", "--prompt", "x", "--prompt-file", "y")
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


def test_demo_prints_a_row_for_each_cache_kind() -> None:
    done = run("demo", "--max-new-tokens", "6", "--runs", "1")
    assert done.returncode == 0, done.stderr
    for kind in ("DynamicCache", "kvloom float32", "kvloom int8", "kvloom int4"):
        assert kind in done.stdout
    assert "6 of 6" in done.stdout
