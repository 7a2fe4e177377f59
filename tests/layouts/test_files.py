"""``kvloom convert`` and ``kvloom layouts``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvloom.cli import main
from kvloom.core import advice
from kvloom.layouts import LAYOUTS, KVTensors, Placement, conversion, convert
from kvloom.layouts.files import convert_file

pytest.importorskip("safetensors")
from safetensors import safe_open
from safetensors.torch import load_file, save_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    pages = {f"layers.{i}.cache": torch.randint(-127, 128, (2, 8, 16, 4, 64)).char() for i in range(2)}
    scales = {f"layers.{i}.scale": torch.rand(2, 8, 16, 4, 2).half() for i in range(2)}
    save_file(pages | scales, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_a_file_goes_to_another_layout_and_back(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, back = (source.with_name(f"{name}.safetensors") for name in ("there", "back"))
    options = ["--from", "vllm", "--to", "ascend_nz", "--page-size", "32", "--shards", "2"]
    assert main(["convert", str(source), str(there), *options]) == 0
    assert "2 layers, 128 slots, 4 heads: 139,264 bytes in 16 tensors" in capsys.readouterr().out
    assert load_file(there)["layers.1.shards.0.key"].shape == (4, 2 * 64 // 32, 32, 32)
    assert load_file(there)["layers.1.shards.0.key_scale"].shape == (4, 2, 32, 2)
    with safe_open(there, framework="pt") as file:
        assert file.metadata() == {"layout": "B (H D/x) S D%x", "heads": "4"}
    options = ["--from", "ascend_nz", "--to", "vllm", "--page-size", "16"]
    assert main(["convert", str(there), str(back), *options]) == 0
    first, last = load_file(source), load_file(back)
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    assert sorted(path.name for path in source.parent.iterdir()) == [
        "back.safetensors",
        "in.safetensors",
        "there.safetensors",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="this system keeps what is mapped in memory")
@pytest.mark.parametrize("layout", ["B 2 S H D", "2 B H S D", "B S H D", "L 2 B S H D"])
def test_memory_of_a_source_is_given_back_as_it_is_read(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, advise = list[int](), advice.advise

    def count(name: str, first: int, last: int) -> bool:
        given.append(last - first)
        return advise(name, first, last)

    shape = [{"L": 2, "2": 2, "B": 32, "S": 16, "H": 4, "D": 64}[axis] for axis in layout.split()]
    names = ["cache"] if "2" in layout else ["key", "value"]
    prefixes = [""] if "L" in layout else ["layers.0.", "layers.1."]
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({front + name: torch.randn(shape) for front in prefixes for name in names}, source)
    monkeypatch.setattr(advice, "advise", count)
    monkeypatch.setattr(conversion, "_PIECE", 1 << 17)
    converted = convert_file(source, target, layout, Placement("B H S D"))
    assert len(given) >= 8 and sum(given) > source.stat().st_size / 2
    want = convert(KVTensors(load_file(source), layout), Placement("B H S D"))
    assert all(torch.equal(x, want.tensors[name]) for name, x in converted.tensors.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--from", "vlm", "--to", "ascend"],
            "--from must be axes such as '2 B S H D' or one of pmx_static_0",
        ),
        (
            ["--from", "vllm", "--to", "ascend", "--shards", "3"],
            "--shards must divide the 4 heads of source, got 3",
        ),
        (["--from", "ascend", "--to", "vllm"], "got 'layers.0.cache'"),
        (["--from", "vllm", "--to", "ascend", "--page-size", "48"], "--page-size must divide the 128 slots"),
        (["--from", "vllm", "--to", "ascend", "--page-size", "0"], "--page-size must be at least 1, got 0"),
        (["--from", "vllm", "--to", "ascend", "--heads", "0"], "--heads must be a multiple"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_written(
    source: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = source.with_name("out.safetensors")
    assert main(["convert", str(source), str(target), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x08\0\0\0\0\0\0\0{}      "[:12]])
def test_a_damaged_file_is_refused(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_bytes(content)
    assert (
        main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--from", "vllm", "--to", "ascend"])
        == 2
    )
    assert "source must be a safetensors file" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--from", "vllm", "--to", "ascend"])
        == 2
    )
    assert "No such file" in capsys.readouterr().err


def test_layouts_are_printed_with_axes_owner_document_and_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts"]) == 0
    out = capsys.readouterr().out
    for layout in LAYOUTS.values():
        assert f"{layout.name}  [{layout.axes}]\n  {layout.owner}: {layout.document}\n" in out
    assert main(["layouts", "ascend_nz"]) == 0
    assert capsys.readouterr().out.count("token     00110011001100112233223322332233\n") == 1
    assert main(["layouts", "nothing"]) == 2


def test_a_target_that_cannot_be_written_is_one_line(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["convert", str(source), "/nowhere/out.safetensors", "--from", "vllm", "--to", "flashinfer"]
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvloom: target must be a file that can be written: ")
