"""Each benchmark runs on a small case, and what does not depend on a clock is as it says."""

import importlib
import json
import math
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.ops.impl.triton import configs

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Peers that happen to be installed may warn.
pytestmark = pytest.mark.filterwarnings("default")


def test_decode_times_every_cache_at_a_context(quick: Callable[..., Any]) -> None:
    rows = quick("decode")["rows"]
    assert {x["sequences"] for x in rows} == {1, 2}
    for sequences in (1, 2):
        ratios = {x["contender"]: x["ratio"] for x in rows if x["sequences"] == sequences}
        assert ratios["DynamicCache"] == 1.0
        kinds = ("float32", "int8", "float32 in place", "int8 in place", "int4 in place")
        assert {"StaticCache", *(f"kvloom {kind}" for kind in kinds)} <= ratios.keys()


def test_store_reads_what_was_committed(quick: Callable[..., Any]) -> None:
    pytest.importorskip("xxhash")
    rows = {x["kind"]: x for x in quick("store")["rows"]}
    assert rows.keys() == {"float32", "int8"}
    assert rows["int8"]["file_bytes"] < 0.3 * rows["float32"]["file_bytes"]


def test_pages_move_to_a_store_in_memory_and_back(quick: Callable[..., Any]) -> None:
    pytest.importorskip("xxhash")
    rows = quick("offload")["rows"]
    sizes = {x["kind"]: x["bytes"] for x in rows if x["tokens"] == 16}
    assert sizes == {"bfloat16": 32768, "int8": 16896, "int4": 8704}
    assert all(x[f"{move}_us"] > 0 for x in rows for move in ("copy", "commit", "out", "back"))


def test_who_knows_the_future_finds_most_and_with_room_all_find_the_same(quick: Callable[..., Any]) -> None:
    rows = quick("knowledge")["rows"]
    for odds in ("other texts", "before"):
        small, large = (
            {x["known"]: x["block_rate"] for x in rows if (x["odds"], x["capacity"]) == (odds, capacity)}
            for capacity in (50_000, 1_000_000)
        )
        *others, without_ends, future = small.values()
        assert 0 < max(others) < without_ends < future
        assert len(small) == 12 and len({round(rate, 9) for rate in large.values()}) == 1


def test_cache_kinds_measures_either_attention(quick: Callable[..., Any]) -> None:
    kinds = {x["kind"]: x for x in quick("cache_kinds")["kinds"]}
    assert len(kinds) == 11
    for kind in ("DynamicCache", "float32", "float32 in place"):
        assert kinds[kind]["num_same"] == kinds[kind]["num_tokens"] == 4
    assert kinds["int8 in place"]["nbytes_per_token"] == kinds["int8"]["nbytes_per_token"] == 1320


def test_batch_invariance_times_steps_and_sessions(quick: Callable[..., Any]) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    rows = quick("batch_invariance")["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    ways = {"stock", "batch invariant", "packed"}
    assert all(row["step"].keys() == ways and row["step"]["stock"] == 1.0 for row in rows)
    assert [session["same"] for session in rows[0]["sessions"]] == [dict.fromkeys(ways, n) for n in (4, 5)]


def test_serving_runs_every_way_over_every_workload(quick: Callable[..., Any]) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    rows = quick("serving")["rows"]
    assert {x["workload"] for x in rows} == {"shared", "apart"} and len(rows) == 10
    kept = {x["way"]: x["nbytes_per_token"] for x in rows}
    assert (kept["kvloom float"], kept["kvloom int8"], kept["kvloom int4"]) == (2560, 1320, 680)


def test_servers_answer_the_same_through_http(quick: Callable[..., Any]) -> None:
    pytest.importorskip(
        "fastapi", reason="transformers serve needs fastapi: pip install 'transformers[serving]'"
    )
    rows = quick("serving_http")["rows"]
    assert [x["way"] for x in rows] == ["transformers serve", "kvloom float", "kvloom int8"]
    assert all(x["cpu_s"] > 0 for x in rows) and rows[0]["same"] == rows[1]["same"] == 2


def test_the_readme_table_is_cut_from_the_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    long_contexts = runpy.run_path(str(BENCHMARKS / "report.py"))["long_contexts"]
    names = ["DynamicCache", "StaticCache"]
    names += [f"kvloom {kind}{where}" for kind in ("float32", "int8") for where in ("", " in place")]
    decode = "".join(f"| {x} | 1.0{i} | 0.5{i} | 0.4{i} |\n" for i, x in enumerate(names))
    memory = "".join(f"| {x} | 151.{i} | 0.9{i}x |\n" for i, x in enumerate(names[:-1]))
    text = long_contexts(
        {
            "Decode": "By tokens:\n\n|  | 1 x 64 | 1 x 8,192 | 8 x 8,192 |\n| --- | --- | --- | --- |\n"
            f"{decode}\nA processor, 2 cores, torch 2.13.0, hqq 0.2, 2026-11-22.\n",
            "Memory": "| cache | peak | peak less |\n| --- | --- | --- |\n"
            f"{memory}| kvloom int8 in place | 42.6 | 3.54x |\n",
            "Cache kinds": "| cache | same tokens |\n| --- | --- |\n"
            + "".join(f"| {x} | {i} of 7 |\n" for i, x in enumerate(names)),
        }
    )
    assert "| kvloom int8 | 0.55x | 0.45x | 42.6 MB (3.54x less) | 5 of 7 |\n" in text
    assert "| kvloom float32 | 0.53x | 0.43x | 151.3 MB | 3 of 7 |\n" in text
    flat = " ".join(text.split())
    assert "At 64 tokens a step takes 1.03x with float32 and 1.05x with int8." in flat
    assert "it takes 0.52x with float32 and 0.54x with int8" in flat
    assert "A processor, 2 cores, torch 2.13.0, 2026-11-22. [All figures]" in flat
    assert max(map(len, text.splitlines())) <= 120


def test_the_readme_picture_is_drawn_from_the_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = runpy.run_path(str(BENCHMARKS / "report.py"))
    figures = report["read_figures"](report["RESULTS"].read_text(encoding="utf-8"))
    memory = figures["Memory"][""]
    drawn = [report["picture"](decode, memory) for name, decode in figures["Decode"].items() if name]
    assert report["PICTURE"].read_text(encoding="utf-8") in drawn


@pytest.mark.process
def test_measured_figures_replace_those_of_their_processor(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import report

    page, readme = tmp_path / "results.md", tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\nas it was\n{report.END}", encoding="utf-8")
    monkeypatch.setattr(report, "RESULTS", page)
    monkeypatch.setattr(report, "README", readme)

    def bench(processor: str, us: float) -> str:
        row = {"public_us": us, "raw_us": 1, "overhead_us": 1}
        memory = {"contender": "c", "max_tokens": False, "held": us * 1e6, "peak": 1, "peak_worst": 1}
        memory |= {"held_ratio": 1, "peak_ratio": 1}
        lines = {"dispatch": {"ops": {"store": row}}, "memory": {"context": 1, "rows": [memory]}}
        monkeypatch.setattr(report.processor, "name", lambda: processor)
        monkeypatch.setattr(report, "measure", lambda name, python: lines[name])
        monkeypatch.setattr(sys, "argv", ["report.py", *lines])
        report.main()
        return page.read_text(encoding="utf-8")

    bench("One, 2 cores", 11.5)
    bench("Two, 4 cores", 22.5)
    text = bench("One, 2 cores", 33.5)
    _, one, two = text.split("## Cost of a dispatched call\n")[1].split("### ")
    assert (
        one.startswith("One, 2 cores\n\n") and "| store | 33.5 |" in one and "\n\nOne, 2 cores, torch" in one
    )
    assert (
        two.startswith("Two, 4 cores\n\n") and "| store | 22.5 |" in two and "\n\nTwo, 4 cores, torch" in two
    )
    memory = text.split("## Memory\n")[1].split("## Cost")[0]
    assert "| c | 33.5 |" in memory and "###" not in memory and memory.count("| c |") == 1
    assert readme.read_text(encoding="utf-8") == f"{report.BEGIN}\nas it was\n{report.END}"


def test_every_figure_is_under_its_own_processor(quick: Callable[..., Any]) -> None:
    import report

    page = (BENCHMARKS / "results.md").read_text(encoding="utf-8")
    figures = report.read_figures(page)
    assert report.write_figures(figures) == page
    of_processor = {section.title: section.of_processor for section in report.SECTIONS.values()}
    for title, texts in figures.items():
        assert all(bool(name) == of_processor[title] for name in texts)
        for name, text in texts.items():
            assert text.splitlines()[-1].startswith(re.split(r" \(family|, ", name)[0])


def test_processors_of_one_name_are_told_apart(quick: Callable[..., Any], tmp_path: Path) -> None:
    import processor

    info = tmp_path / "cpuinfo"
    names = []
    for model in (143, 207):
        info.write_text(
            f"cpu family\t: 6\nmodel\t\t: {model}\nmodel name\t: X(R) 2\nflags\t\t: avx2 avx512f\n"
        )
        names.append(processor.name(info))
    cores = os.cpu_count()
    assert names == [f"X(R) 2 (family 6, model {x}) with AVX-512, {cores} cores" for x in (143, 207)]
    assert processor.slug(names[0]) == f"x-r-2-family-6-model-143-with-avx-512-{cores}-cores"


def test_last_level_caches_are_counted_once_each(
    quick: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import processor
    import rounds

    for core, sharing in enumerate(("0-1", "0-1", "2-3", "2-3")):
        for i, (level, cores, size) in enumerate(((1, core, 48), (2, core, 2048), (3, sharing, 32768))):
            index = tmp_path / f"cpu{core}" / "cache" / f"index{i}"
            index.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", cores), ("size", f"{size}K")):
                (index / name).write_text(f"{text}\n")
    for core_set, megabytes in (({0, 1}, 32), ({0, 2, 3}, 64), ({7}, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=core_set: cores)
        assert processor.last_level_cache(tmp_path) == megabytes << 20
    monkeypatch.undo()
    assert rounds.COLD >= max(320 << 20, processor.last_level_cache())


def test_memory_counts_what_the_formats_say(quick: Callable[..., Any]) -> None:
    result = quick("memory")
    rows = {(x["contender"], x["max_tokens"]): x for x in result["rows"]}
    stock, int8 = rows["DynamicCache", False], rows["kvloom int8", True]
    per_token = 4 * 2 * 8 * 64
    assert stock["held"] == pytest.approx(per_token * 4 * (result["context"] + 1), rel=0.01)
    room = result["context"] + 16
    assert int8["held"] == pytest.approx(per_token * (1 + 2 / 64) * room, rel=0.02)
    assert all(x["peak_worst"] >= x["peak"] >= x["held"] for x in result["rows"])


def test_quality_loses_more_with_fewer_bits(quick: Callable[..., Any]) -> None:
    rows = {x["contender"]: x for x in quick("quality")["rows"] if not x["unquantized"]}
    assert rows["DynamicCache"]["mean_kl"] == 0.0
    assert (
        rows["kvloom int8"]["mean_kl"] < rows["kvloom int8/int4"]["mean_kl"] < rows["kvloom int4"]["mean_kl"]
    )
    nbytes = [rows[x]["nbytes_per_token"] for x in ("kvloom int4", "kvloom int8", "DynamicCache")]
    assert nbytes == sorted(nbytes)
    assert rows["kvloom int8/int4"]["nbytes_per_token"] == rows["kvloom int4/int8"]["nbytes_per_token"]


CHANGED = ("outliers", "biases", "both")


def test_quality_at_length_is_lost_where_keys_stick_out_unless_smoothed(quick: Callable[..., Any]) -> None:
    rows = {(x["keys"], x["contender"]): x for x in quick("quality_length")["rows"]}
    assert {keys for keys, _ in rows} == {"plain", *CHANGED}
    for contender, is_lost in (("kvloom int8", False), ("kvloom int8, not smoothed", True)):
        plain, *others = (rows[keys, contender]["mean_kl"] for keys in ("plain", *CHANGED))
        assert plain > 0 and (min(others) > 3 * plain) == is_lost == (max(others) > 3 * plain)
    stock, same = (rows[keys, "DynamicCache"]["perplexity"] for keys in ("plain", "outliers"))
    assert stock == pytest.approx(same, rel=1e-3)
    assert {x["tokens"] for x in rows.values()} == {24}


PLAIN, ROTATED = "int4,rotate=none,recent=0,smooth=none", "int4,recent=0,smooth=none"


def test_formats_are_simulated_as_the_kernels_round(quick: Callable[..., Any]) -> None:
    result = quick("formats")
    rows = {x["format"]: x for x in result["rows"]}
    assert rows["as int4"]["mean_kl"] == pytest.approx(result["int4"], rel=1e-3)
    assert (rows["as int4"]["nbytes_per_token"], rows["groups of 16"]["nbytes_per_token"]) == (680, 800)
    assert rows["rotated keys"]["mean_kl_outliers"] < 0.2 * rows["as int4"]["mean_kl_outliers"]
    assert rows["the same, newest 64 exact"]["mean_kl"] < 1e-9  # of 64 tokens
    stored = {x["cache"]: x for x in result["stored"]}
    for simulated, kind in (("as int4", PLAIN), ("rotated keys", ROTATED)):
        assert stored[kind]["mean_kl"] == pytest.approx(rows[simulated]["mean_kl"], rel=1e-3)
        assert stored[kind]["nbytes_per_token"] == rows[simulated]["nbytes_per_token"]
    assert stored[ROTATED]["error_outliers"] < 0.7 * stored[PLAIN]["error_outliers"]
    assert stored["planned, 1,000 bytes"]["nbytes_per_token"] <= 1000


def test_sharing_measures_every_cache_that_reorders(quick: Callable[..., Any]) -> None:
    result = quick("sharing")
    assert {x["num_tokens"] for x in result["rows"] + result["beams"]} == {32}
    assert {"DynamicCache", "kvloom int4 in place"} <= {x["contender"] for x in result["beams"]}


def test_growth_measures_and_draws(quick: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "growth.svg"
    result = quick("growth", "--plot", str(path))
    assert [x["length"] for x in result["rows"]] == [16, 32]
    assert path.exists() == result["drawn"]
    assert all(len(x["us"]) == len(x["sizes"]) == 2 and x["us"][0] > 0 for x in result["sizes"])


@pytest.mark.compile
def test_generate_counts_tokens_and_bytes(quick: Callable[..., Any]) -> None:
    result = quick("generate", "--threads", "1")
    rows = {x["contender"]: x for x in result["rows"]}
    assert result["rows"][0]["contender"] == "DynamicCache"
    tokens = result["context"] + 3 * result["new"]
    assert rows["DynamicCache"]["nbytes"] == 4 * 2 * 8 * 64 * 4 * tokens
    assert all(x["tokens_per_s"] > 0 for x in result["rows"])
    kinds = ("int8", "bfloat16", "float32", "int4")  # of few tokens int4 keeps all as they are, too
    nbytes = [rows[f"kvloom {kind} in place"]["nbytes"] for kind in kinds]
    assert nbytes == sorted(nbytes)


def test_gpu_lists_what_it_would_measure(quick: Callable[..., Any]) -> None:
    cases = quick("gpu", "--list")["cases"]
    kinds = ("bf16", "int8 g64", "int4 g64")
    expected = {(what, kind) for what in ("decode", "append", "prefill", "chunk") for kind in kinds}
    others = {("latents", "bf16"), ("chunk", "int4 g64, recent=64")}
    assert {(x["what"], x["kind"]) for x in cases} == expected | others
    assert {x["what"] for x in quick("gpu", "--list", "append", "latents")["cases"]} == {"append", "latents"}


def test_gpu_measures_nothing_that_it_does_not_know(
    quick: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        quick("gpu", "--list", "append", "decod")
    known = ["append", "chunk", "decode", "latents", "prefill"]
    expected = f"expected what is measured, some of {known}, got ['decod']"
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["gpu", "gpu_tune"])
def test_no_figure_is_taken_without_a_device(quick: Callable[..., Any], name: str) -> None:
    with pytest.raises(SystemExit, match="no figure was taken"):
        quick(name)


def test_a_configuration_is_pinned_if_it_is_right_and_faster_in_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    tune, cases = importlib.import_module("gpu_tune"), importlib.import_module("gpu_cases")
    asked = next(x for x in tune.questions(quick=False) if x.name == "decode bf16")
    now, wrong, mixed, faster, large = asked.pinned, *asked.others[:4]
    used, seconds = [now], {now: 10.0, wrong: 1.0, mixed: 2.0, faster: 8.0}
    right = torch.linspace(-1, 1, 9)

    def call(_: int) -> torch.Tensor:
        used[0] = configs.config_for(asked.case)
        return right + (used[0] == wrong) * 0.1 + (used[0] != now) * 0.004

    def prepare(row: Any, peers: bool) -> Any:
        return cases.Work({"kvloom": call}, 0, 0, row.batch)

    def timed(call: Any, turns: int, replays: int) -> float:
        return (20.0 if used[0] == mixed and turns == 1 else seconds[used[0]]) / 1e6

    monkeypatch.setattr(cases, "prepare", prepare)
    monkeypatch.setattr(tune, "seconds", timed)
    said = tune.answer(
        asked._replace(others=asked.others[:4]), {("decode bf16", large): "too large"}, math.inf
    )
    assert said["pin"] == faster
    assert said["gain"] == 1.25
    reasons = [x[-1] for x in said["why_not"]]
    assert reasons == ["too large", "other results than the pinned one in bf16, batch 64"]
    late = tune.answer(asked, {}, -math.inf)
    assert late["pin"] is None
    assert {x[-1] for x in late["why_not"]} == {"no time was left"}


def test_every_configuration_worth_a_look_is_another_than_the_pinned_one(quick: Callable[..., Any]) -> None:
    asked = quick("gpu_tune", "--list")["questions"]
    assert [x["name"] for x in asked] == [
        "append", "latents bf16", "latents int8 g64", "decode int4 g64", "decode int8 g64", "decode bf16",
    ]  # fmt: skip
    for question in asked:
        case = question["case"] and configs.Case(*question["case"])
        pinned = configs.MOVES if case is None else configs.pinned(case)
        assert list(pinned) not in question["others"]


@pytest.mark.compile
def test_a_whole_model_has_a_row_for_each_cache(quick: Callable[..., Any]) -> None:
    torch.set_num_threads(1)
    rows = quick("gpu_model", "step", "graph")["rows"]
    assert {(x["what"], x["kind"]) for x in rows} == {
        *(("step", kind) for kind in ("DynamicCache", "auto", "int8", "int4")),
        *(("graph", kind) for kind in ("StaticCache", "auto", "int8")),
    }
    assert all(x["ms"] > 0 for x in rows)
    stock = ("DynamicCache", "StaticCache")
    assert [x["kind"] in stock for x in rows] == ["ratio" not in x for x in rows]
    late = quick("gpu_model", "--seconds", "0", "shared")["rows"]
    assert [x["why_not"] for x in late] == ["no time was left"] * 2


def test_gpu_page_has_a_row_for_each_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    page = runpy.run_path(str(BENCHMARKS / "gpu_page.py"))["page"]
    row = {"model": "m", "batch": 8, "context": 512, "of_copy_bandwidth": 0.871, "tflops": 12.3}
    rows = [
        {**row, "what": "decode", "kind": "bf16", "kvloom_us": 40.0, "sdpa_us": 60.0},
        {**row, "what": "decode", "kind": "int8 g64", "kvloom_us": 20.0},
        {**row, "what": "append", "kind": "bf16", "kvloom_us": 3.0, "flashinfer_why_not": "no such page"},
    ]
    about = {
        "device": "d",
        "torch": "t",
        "triton": "u",
        "date": "2026",
        "copy_gb_per_s": 4000.0,
        "checks": {},
    }
    text = page([{**about, "rows": rows}])
    assert "| m | bf16 | 8 | 512 | 40.0 | 87% | 12.3 | 1.00 | 1.50 |  |  |  |" in text
    assert "| m | int8 g64 | 8 | 512 | 20.0 | 87% | 12.3 | 2.00 |  |  |  |  |" in text
    assert "## d, 2026" in text
    assert "### append" in text
    assert (
        "No device has measured these yet: prefill, chunk, latents, steps of a whole model, steps in" in text
    )
    assert text.endswith("flashinfer did not run everywhere: no such page.\n")
    assert "### prefill" not in text
    of_model = {
        "what": "step",
        "kind": "int8",
        "batch": 8,
        "context": 2048,
        "ms": 7.5,
        "ratio": 0.7,
        "peak": 0.6,
    }
    late = {"what": "graph", "kind": "auto", "batch": 1, "context": 32, "why_not": "no time was left"}
    text = page([{"device": "d", "torch": "t", "date": "2026", "checks": {}, "rows": [of_model, late]}])
    assert "| int8 | 8 | 2048 | 7.500 | 0.70 | 0.60 |" in text
    assert "| auto | 1 | 32 | no time was left |  |  |" in text


def test_figures_of_a_gpu_replace_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    kept = runpy.run_path(str(BENCHMARKS / "gpu.py"))["kept"]
    path = tmp_path / "gpu_results.json"
    row = {"what": "decode", "model": "m", "kind": "bf16", "batch": 8, "context": 512}
    decode, append = {**row, "kvloom_us": 1}, {**row, "what": "append", "kvloom_us": 2}
    first = {"device": "d", "rows": [decode, append]}
    assert kept(path, first) == [first]
    other = {"device": "e", "rows": [decode]}
    path.write_text(json.dumps([first, other]))
    again = {"device": "d", "rows": [{**row, "kvloom_us": 3}]}
    assert kept(path, again) == [{"device": "d", "rows": [append]}, other, again]
    both = {"device": "d", "rows": [decode, append]}
    assert kept(path, both) == [other, both]
