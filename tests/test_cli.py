"""The command line as a user runs it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from core.spellings import BAD

import kvloom
from kvloom.cli import main
from kvloom.core.entries import choice
from kvloom.core.specs import dtype_name
from kvloom.core.spelling import STORAGE
from kvloom.integrations import vllm
from kvloom.models import bundled_model_path
from kvloom.ops import cpu_kernels, cuda_kernels, why_unavailable
from kvloom.ops.impl import cpu, triton


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvloom`` in a process of its own, with variables of the environment."""
    command = [sys.executable, "-c", "import sys; from kvloom.cli import main; sys.exit(main())", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


def test_info_names_version_backends_capability_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    for word in (
        "kvloom",
        "torch",
        "backends",
        "reference",
        "cpu (",
        "on CUDA",
        "in vLLM",
        "cpu capability",
        "devices",
    ):
        assert word in out


def test_info_says_to_how_many_rows_products_are_padded_and_what_onednn_packs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvloom.integrations.transformers.invariance import packing

    def why_not(weight: Any) -> str | None:
        name = dtype_name(weight.dtype)
        return None if name == "float32" else f"{name} without its instructions"

    monkeypatch.setattr(packing, "why_not_packable", why_not)
    assert main(["info"]) == 0
    rows = dict(re.findall(r"^(\w+) rows +(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert [*rows] == ["float32", "bfloat16", "float16"]
    for name, said in rows.items():
        rule, packed = said.split("; ")
        assert re.fullmatch(r"(at least|multiples of) \d+ rows.*|\d+ rows at a time|one row at a time", rule)
        assert packed == ("packed" if name == "float32" else f"not packed: {name} without its instructions")


@pytest.mark.process
@pytest.mark.parametrize("error", ["needs another hub\nand more", None])
def test_info_is_printed_where_transformers_cannot_be_used(error: str | None, tmp_path: Path) -> None:
    """It is too old, or what it needs itself is."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(f"raise ImportError({error!r})" if error else "")
    found = run("info", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert (found.returncode, found.stderr) == (0, "")
    said = "needs another hub\n" if error else "cannot import name"
    assert "devices        cpu" in found.stdout
    assert f"\nrows           not tried: transformers cannot be used: {said}" in found.stdout


@pytest.mark.parametrize(
    ("isa", "kernels"),
    [
        ("amx", "amx; attention prefetches to l1"),
        ("avx2", "avx2; no amx: no tiles; attention prefetches to l1"),
        (None, "none: no compiler"),
    ],
)
@pytest.mark.parametrize("version", ["3.6.0", None])
def test_info_names_the_kernels_or_says_why_there_are_none(
    isa: str | None,
    kernels: str,
    version: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cpu, "ISA", isa)
    monkeypatch.setattr(cpu, "PREFETCH", "l1" if isa else None)
    monkeypatch.setattr(cpu, "WHY_NO_AMX", "no tiles" if isa == "avx2" else None)
    monkeypatch.setattr(cpu, "WHY_NOT", None if isa else "no compiler")
    monkeypatch.setattr(triton, "why_not_installed", lambda: None if version else "needs Triton")
    monkeypatch.setattr(triton, "triton_version", lambda: version)
    assert (cpu_kernels(), cuda_kernels()) == (isa, version)
    assert why_unavailable("cpu") == (None if isa else "no compiler")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"reference, cpu ({kernels})\n" in out
    assert f"on CUDA        {'triton 3.6.0' if version else 'reference (triton needs Triton)'}\n" in out


@pytest.mark.parametrize("why_not", [None, "KVLOOM_VLLM is 0"])
def test_info_says_whether_vllm_takes_its_attention_from_here(
    why_not: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "why_not_registered", lambda: why_not)
    monkeypatch.setattr(vllm, "vllm_version", lambda: "0.32.0")
    assert main(["info"]) == 0
    said = "no: KVLOOM_VLLM is 0" if why_not else "0.32.0, on a CPU"
    assert f"in vLLM        {said}\n" in capsys.readouterr().out


@pytest.mark.skipif(cpu.ISA is None, reason=f"no compiled kernels: {cpu.WHY_NOT}")
def test_info_times_each_instruction_set_and_leaves_the_chosen_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["info", "--probe"]) == 0
    _, isas, prefetches = capsys.readouterr().out.split("\n\n")
    head, *rows = isas.splitlines()
    assert [row.split()[0] for row in rows] == cpu.runnable_isas()
    assert rows[-1].split()[0] == "baseline" and "amx-emulated" not in cpu.runnable_isas()
    for row in rows:
        times = [float(x.replace(",", "")) for x in row.split()[1:4]]
        assert head.count("bfloat16") == 2 and min(times) > 0
    assert [row.split()[0] for row in rows if "chosen" in row] == [cpu.ISA]
    handle = cpu._HANDLE
    assert handle is not None and handle.kvloom_isa().decode() == cpu.ISA
    _, *rows = prefetches.splitlines()
    assert [row.split()[0] for row in rows] == ["l1", "l2"]
    assert [row.split()[0] for row in rows if "chosen" in row] == [cpu.PREFETCH]
    assert min(float(x.replace(",", "")) for row in rows for x in row.split()[1:3]) > 0
    assert cpu.PREFETCHES[handle.kvloom_prefetch_to_l2(-1)] == cpu.PREFETCH


def test_info_times_nothing_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "ISA", None)
    monkeypatch.setattr(cpu, "WHY_NOT", "no compiler")
    assert main(["info", "--probe"]) == 2
    assert "no compiled kernels to time: no compiler" in capsys.readouterr().err


def test_generate_continues_the_prompt_the_same_in_a_float32_cache_and_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = "def load(path):\n    "
    assert main(["generate", "--prompt", prompt, "--kv", "float32", "--max-new-tokens", "12"]) == 0
    captured = capsys.readouterr()
    import torch

    from kvloom.integrations.transformers import load_model

    model, tokenizer = load_model(bundled_model_path(), torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert captured.out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert "12 tokens in" in captured.err
    assert captured.err.endswith(
        f"where a DynamicCache has {5120 * (len(tokens) - 1):,}]\n"
    )  # 1,280 floats each


def test_generate_says_what_the_next_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    said = []
    for words, store in ((2, "a"), (40, "a"), (40, "a"), (40, "memory://x"), (40, "file")):
        url = store if ":" in store else str(tmp_path / store)
        options = ["--prompt", "a word " * words, "--store", url, "--max-new-tokens", "24"]
        assert main(["generate", *options]) == 0
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0].endswith("which stores whole pages of 16 tokens, without the last token]")
    assert said[1].endswith("the next run reads them from there]")
    assert "prompt tokens read from" in said[2] and not said[2].startswith("[no ")
    assert said[3].endswith("whose pages end with this process]")
    assert said[4].endswith("and none were written to it]")


def test_generate_reads_a_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("import os\n", encoding="utf-8")
    arguments = ["generate", "--prompt-file", str(file), "--kv", "int4:g32"]
    assert main([*arguments, "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("import os\n")
    assert "int4:g32 cache" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "x", "--model", "/nowhere"], "--model must be a local folder"),
        (
            ["--prompt", "x", "--kv", "int8:g48"],
            "--kv must have a group that divides the head dim 64, got 'int8:g48'",
        ),
        (
            ["--prompt", "x", "--kv", "int4:g3"],
            "--kv must have a group of a multiple of 2 for 4 bits, got 'int4:g3'",
        ),
        *(
            (
                ["--prompt", "x", "--kv", text],
                f"--kv must be one of {choice(STORAGE)}, codes also with a "
                f"group such as int8:g32 or an option such as int4,rotate=keys, got {text!r}",
            )
            for text in BAD
            if isinstance(text, str)
        ),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", ""], "--prompt must have at least one token"),
        (["--prompt", "\udcff"], "--prompt must be text in UTF-8"),
        (
            ["--prompt-file", "/nowhere/prompt.txt"],
            "--prompt-file must be text in UTF-8: [Errno 2] No such file",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_help_says_how_a_group_is_spelled(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["generate", "--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "--kv KIND[:gGROUP]" in out
    assert "int8:g32" in out


def test_demo_names_the_option_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--runs", "-1"]) == 2
    assert capsys.readouterr().err == "kvloom: --runs must be at least 1, got -1\n"


def test_a_prompt_file_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"import os\xff")
    assert main(["generate", "--prompt-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvloom: --prompt-file must be text in UTF-8: ")
    assert "0xff in position 9" in err
    assert err.count("\n") == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"kvloom {kvloom.__version__}\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "args",
    [
        ["--prompt", "x", "--model", "/nowhere"],
        ["--prompt", "x", "--kv", "int8:g0"],
        ["--prompt", "x", "--kv", "int4:g3"],
        ["--prompt", "x", "--max-new-tokens", "0"],
        ["--prompt-file", "/nowhere"],
    ],
)
def test_arguments_are_checked_before_heavy_imports(args: list[str]) -> None:
    code = (
        "import sys; from kvloom.cli import main; status = main(sys.argv[1:])\n"
        "print(status, {'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, "generate", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"


@pytest.mark.process
def test_prompt_and_prompt_file_exclude_each_other() -> None:
    done = run("generate", "--prompt", "x", "--prompt-file", "y")
    assert done.returncode == 2
    assert "not allowed with" in done.stderr


def test_what_the_terminals_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["generate", "--prompt", "caf\u00e9 = ", "--max-new-tokens", "1"]) == 0
    assert out.getvalue().startswith(b"caf\\xe9 = ")


def print_to(output: Any, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A command that imports little, in a process of its own, whose standard output is ``output``."""
    trace = folder / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [1]}\n')
    code = "import sys; from kvloom.cli import main; sys.exit(main())"
    command = [sys.executable, "-E", "-c", code, "simulate", str(trace), *options]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.process
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = print_to(full, tmp_path, "--json")
    assert done.returncode == 2
    assert done.stderr == "kvloom: [Errno 28] No space left on device\n"


@pytest.mark.process
@pytest.mark.parametrize("options", [("--json",), ()], ids=["text", "table"])
def test_a_reader_that_has_gone_is_no_error(options: tuple[str, ...], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = print_to(writing, tmp_path, *options)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_output_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "kvloom: standard output must be open, got a closed one\n"


def test_demo_prints_a_row_for_each_cache_kind_and_reads_its_prompt_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for expected in ("no prompt tokens were read from", "prompt tokens read from"):
        assert main(["demo", "--max-new-tokens", "6", "--runs", "1"]) == 0
        captured = capsys.readouterr()
        for kind in ("DynamicCache", "kvloom float32", "kvloom int8", "kvloom int4"):
            assert kind in captured.out
        assert "6 of 6" in captured.out
        assert expected in captured.err
    assert list((tmp_path / "kvloom" / "demo").rglob("*.safetensors"))
