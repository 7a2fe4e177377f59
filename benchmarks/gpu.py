"""Checks and measures the kernels for CUDA in one call of a few minutes.

Writes ``gpu_results.json`` and the page, and prints one JSON line. Times are of CUDA graphs over memory that
no cache holds, medians of several replays; of prompts and chunks, of calls that are queued. Bandwidth is a
share of what the device copies in the same run.
Figures of other devices, and those of this one that were not measured again, stay on the page.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cases
import torch
from gpu_page import page

HERE = Path(__file__).parent
CHECKS = HERE.parent / "tests/ops"
CHECKED = "ties or special or lengths or few_and_many or alone or decoding or broken or replays"
"""Tests that compile few kernels; `make test-triton` runs all."""
WATCHED = "few_and_many or strided_and_none or nothing_around"


AHEAD = 2_000_000
"""Cycles, about a millisecond, that the host has to queue a call."""


def seconds(call: Callable[[int], object], turns: int, replays: int = 7) -> float:
    """Time of one call; ``call(i)`` uses memory i of ``turns``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            call(turn)
    times = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / turns)
    return median(times[1:])


def seconds_queued(call: Callable[[int], object], turns: int, replays: int = 7) -> float:
    """``seconds`` of calls that are queued behind another kernel, so that the device never waits for them."""
    times = []
    call(0)
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD * turns)
        begin.record()
        for turn in range(turns):
            call(turn)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / turns)
    return median(times[1:])


def copy_bandwidth() -> float:
    """Bytes read and written in a second by a copy of a gibibyte, by the device's engine or by a kernel."""
    source, target = torch.empty(2, 1 << 28, dtype=torch.float32, device="cuda")
    engine = seconds(lambda _: target.copy_(source), 4)
    return 2 * source.nbytes / min(engine, seconds(lambda _: torch.add(source, 1.0, out=target), 4))


def check() -> dict[str, str]:
    """A part of the kernels' tests on this device, and a smaller one with every access watched."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    suite = [str(path) for path in sorted(CHECKS.glob("test_triton_*.py")) if "compiles" not in path.name]
    runs = {"tests": [*command, "--numprocesses", "8", "-k", CHECKED, *suite]}
    watcher = shutil.which("compute-sanitizer")
    if watcher is not None:
        memcheck = [watcher, "--tool", "memcheck", "--error-exitcode", "9"]
        runs["memcheck"] = [*memcheck, *command, "-k", WATCHED, *suite]
    said = {} if watcher else {"memcheck": "not run: compute-sanitizer is not installed"}
    for name, run in runs.items():
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        said[name] = (done.stdout.strip().splitlines() or ["no output"])[-1]
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return said


def compile_all(cases: list[gpu_cases.Case]) -> None:
    """Call each kind of case once, on few tokens, in several processes: Triton keeps what it compiled."""
    small = {case._replace(batch=2, context=512) for case in cases}
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(_compile, sorted(small), chunksize=1)


def _compile(case: gpu_cases.Case) -> None:
    for call in gpu_cases.prepare(case, peers=False, cold=0).contenders.values():
        call(0)
    torch.cuda.synchronize()


def kept(path: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Earlier results without the rows that ``result`` replaces, and ``result``."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    measured = {_key(row) for row in result["rows"]}
    for old in results:
        if old["device"] == result["device"]:
            old["rows"] = [row for row in old["rows"] if _key(row) not in measured]
    return [old for old in results if old["rows"]] + [result]


def save(result: dict[str, Any], folder: Path) -> None:
    """Add a result to those in a folder, and write their page."""
    path = folder / "gpu_results.json"
    results = kept(path, result)
    path.write_text(json.dumps(results) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in gpu_cases.Case._fields)


def measure(case: gpu_cases.Case, bandwidth: float) -> dict[str, Any]:
    """One case and its peers."""
    work = gpu_cases.prepare(case)
    row: dict[str, Any] = {**case._asdict(), "bytes": work.num_bytes, "flops": work.flops}
    for name, call in work.contenders.items():
        try:
            took = (seconds if work.in_graph else seconds_queued)(call, work.turns)
            row[f"{name}_us"] = round(took * 1e6, 1)
        except (RuntimeError, NotImplementedError) as error:  # a peer's limits are its own
            if name == "kvloom":
                raise
            row[f"{name}_why_not"] = str(error).splitlines()[0][:120]
    took = row["kvloom_us"] / 1e6
    row["of_copy_bandwidth"] = round(work.num_bytes / took / bandwidth, 3)
    row["tflops"] = round(work.flops / took / 1e12, 1)
    del work
    torch.cuda.empty_cache()
    return row


def main() -> None:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", help="decode, append, prefill, chunk or latents; all, if none is named"
    )
    parser.add_argument("--quick", action="store_true", help="few small cases")
    parser.add_argument("--list", action="store_true", help="print the cases, measure nothing")
    parser.add_argument("--no-checks", action="store_true", help="measure only")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder of gpu_results.json and gpu_results.md"
    )
    args = parser.parse_args()
    cases = gpu_cases.cases(quick=args.quick)
    measured = {case.what for case in cases}
    if unknown := set(args.what) - measured:
        parser.error(f"expected what is measured, some of {sorted(measured)}, got {sorted(unknown)}")
    cases = [case for case in cases if not args.what or case.what in args.what]
    result: dict[str, Any] = {"figure": "gpu"}
    if args.list:
        result["cases"] = [case._asdict() for case in cases]
        print(json.dumps(result))
        return
    if not torch.cuda.is_available():
        sys.exit("gpu measures kernels on a CUDA device, and there is none: no figure was taken")
    import triton

    result |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        "checks": {} if args.no_checks else check(),
    }
    compile_all(cases)
    with torch.no_grad():
        bandwidth = copy_bandwidth()
        result["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
        result["rows"] = [measure(case, bandwidth) for case in cases]
    save(result, args.out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
