"""Tries other configurations of the kernels on a CUDA device, in two minutes, and says which to pin.

Each must give the results of the pinned one: the same bytes of an append, attention within rounding. Prints
one JSON line. What is faster is written to a file; ``kvloom.ops.impl.triton.configs.tuned(read_tuned(path,
device))`` uses it, and nothing does by itself.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import gpu_cases
import torch
from gpu import seconds
from torch import Tensor

from kvloom.core.views import raw
from kvloom.ops.impl.triton.configs import MOVES, Case, Config, Tile, pinned, tuned, write_tuned

TOLERANCE: Final = 2.0**-6
"""Most by which attention may differ, over its largest magnitude: weights and results round to 2^-8 each."""

GAIN: Final = 1.03
"""Least ratio of times for which a change is advised."""

NOISE: Final = 1.01
"""Ratio of times up to which a row counts as no slower."""

Choice = Config | Tile


class Question(NamedTuple):
    """A pinned configuration, of a case or of moves, the rows that it decides, and others worth a look."""

    name: str
    case: Case | None
    rows: list[gpu_cases.Case]
    others: list[Choice]

    @property
    def pinned(self) -> Choice:
        """What is used now."""
        return MOVES if self.case is None else pinned(self.case)


def questions(*, quick: bool) -> list[Question]:
    """Those of rows that are furthest from a copy first."""
    moves = [Tile(*x) for x in ((512, 1), (512, 2), (1024, 4), (2048, 2), (2048, 4), (4096, 4))]
    few = [Config(8, *x) for x in ((32, 1, 4, 8), (32, 1, 6, 8), (32, 1, 5, 6), (64, 1, 3, 8), (64, 2, 4, 4))]
    # As many programs as have registers: 255 for each thread.
    latents = [
        Config(16, *x) for x in ((16, 2, 3, 4), (16, 4, 3, 2), (32, 4, 2, 2), (32, 8, 3, 1), (64, 8, 2, 1))
    ]
    row = gpu_cases.Case
    appends = [row("append", "Llama-3-8B", kind, n, 1) for kind in gpu_cases.KINDS for n in (8192, 1)]
    asked = [Question("append", None, appends, [*moves])]
    for kind, bits in (("bf16", 0), ("int8 g64", 8)):
        case = Case(True, 2, bits, gpu_cases.RANK, gpu_cases.LATENTS["DeepSeek-V2-Lite"], gpu_cases.ROPE)
        rows = [row("latents", "DeepSeek-V2-Lite", kind, n, 8192) for n in (64, 1)]
        once = [Config(16, *x, True) for x in ((32, 4, 3, 2), (32, 8, 3, 1), (64, 8, 2, 1))]
        asked.append(Question(f"latents {kind}", case, rows, latents if bits else latents + once))
    for kind, bits, sizes in (
        ("int4 g64", 4, ((64, 4096), (8, 32768))),
        ("int8 g64", 8, ((64, 4096), (8, 32768))),
        ("bf16", 0, ((64, 512), (8, 512), (1, 512))),
    ):
        case = Case(True, 2, bits, gpu_cases.HEAD_DIM, gpu_cases.MODELS["Llama-3-8B"])
        rows = [row("decode", "Llama-3-8B", kind, *size) for size in sizes]
        asked.append(Question(f"decode {kind}", case, rows, [x for x in few if x != pinned(case)]))
    if quick:
        return [x._replace(rows=[_small(x.rows[0])], others=x.others[:1]) for x in asked]
    return asked


def main() -> None:
    """Compile in many processes, then measure one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one other configuration each, small cases")
    parser.add_argument("--list", action="store_true", help="print what would be tried, measure nothing")
    parser.add_argument("--seconds", type=float, default=110, help="after which nothing more is tried")
    parser.add_argument("--out", type=Path, default=Path("kvloom_tuned.json"), help="file of what is faster")
    args = parser.parse_args()
    deadline, asked = time.monotonic() + args.seconds, questions(quick=args.quick)
    result: dict[str, Any] = {"figure": "gpu_tune"}
    if args.list:
        print(json.dumps(result | {"questions": [x._asdict() for x in asked]}))
        return
    if not torch.cuda.is_available():
        sys.exit("gpu_tune measures kernels on a CUDA device, and there is none: no figure was taken")
    result["device"] = torch.cuda.get_device_name()
    failed = compile_all(asked, deadline - args.seconds / 2)
    with torch.no_grad():
        result["questions"] = [answer(x, failed, deadline) for x in asked]
    faster = {
        question.case: Config(*said["pin"])
        for question, said in zip(asked, result["questions"], strict=True)
        if question.case is not None and said["pin"] is not None
    }
    write_tuned(args.out, result["device"], faster)
    print(json.dumps(result))


def compile_all(asked: list[Question], deadline: float) -> dict[tuple[str, Choice], str]:
    """Call everything on few tokens, in several processes; returns what does not run, and why."""
    jobs = sorted(
        {(x.case, choice, _small(row)) for x in asked for row in x.rows for choice in (x.pinned, *x.others)},
        key=lambda job: job[2].what == "append",  # attention compiles longer
    )
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        said = pool.starmap(_compile, [(*job, deadline) for job in jobs], chunksize=1)
    whys = {(job[0], job[1]): why for job, why in zip(jobs, said, strict=True) if why}
    return {(x.name, choice): why for x in asked for (case, choice), why in whys.items() if case == x.case}


def answer(question: Question, failed: dict[tuple[str, Choice], str], deadline: float) -> dict[str, Any]:
    """Times of each configuration by row, and which to pin, if another is faster in all."""
    times: dict[Choice, dict[str, float]] = {}
    why_not = {choice: why for (name, choice), why in failed.items() if name == question.name}
    for row in question.rows:
        work = gpu_cases.prepare(row, peers=False)
        expected: list[Tensor] = []
        for choice in (question.pinned, *question.others):
            if choice in why_not:
                continue
            if time.monotonic() > deadline:
                why_not[choice] = "no time was left"
                continue
            with use(question.case, choice):
                got = results(work)
                expected = expected or got
                if not agree(got, expected, is_exact=question.case is None):
                    why_not[choice] = f"other results than the pinned one in {row.kind}, batch {row.batch}"
                    continue
                took = seconds(work.contenders["kvloom"], work.turns, replays=5)
            times.setdefault(choice, {})[f"{row.kind} {row.batch} x {row.context}"] = round(took * 1e6, 2)
        del work, expected
        torch.cuda.empty_cache()
    return advice(question, times, why_not)


def advice(
    question: Question, times: dict[Choice, dict[str, float]], why_not: dict[Choice, str]
) -> dict[str, Any]:
    """What to pin: the fastest by the mean ratio, if it gains, slows no row, and was measured in all."""
    now = times.get(question.pinned, {})
    gains = {
        choice: prod(now[row] / took[row] for row in now) ** (1 / len(now))
        for choice, took in times.items()
        if choice not in why_not
        and took.keys() == now.keys()
        and all(took[row] <= NOISE * now[row] for row in now)
    }
    best = max(gains, key=lambda x: gains[x], default=question.pinned)
    return {
        "name": question.name,
        "pinned": question.pinned,
        "pin": best if gains.get(best, 0) >= GAIN else None,
        "gain": round(gains.get(best, 0), 3),
        "us": [[*choice, took] for choice, took in times.items()],
        "why_not": [[*choice, why] for choice, why in why_not.items()],
    }


def use(case: Case | None, choice: Choice) -> Any:
    """Context in which a configuration is used."""
    return tuned({}, choice) if case is None else tuned({case: choice})


def results(work: gpu_cases.Work) -> list[Tensor]:
    """What a call returns or, if it writes, writes."""
    for x in work.written:
        raw(x).zero_()
    out: Any = work.contenders["kvloom"](0)
    return [raw(x).clone() for x in work.written] or [out.clone()]


def agree(got: list[Tensor], expected: list[Tensor], *, is_exact: bool) -> bool:
    """Whether results are the same, or differ by rounding."""
    if is_exact:
        return all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    (x,), (y,) = got, expected
    return bool((x.float() - y.float()).abs().max() <= TOLERANCE * y.float().abs().max())


def _small(row: gpu_cases.Case) -> gpu_cases.Case:
    return row._replace(batch=2, context=512)


def _compile(case: Case | None, choice: Choice, row: gpu_cases.Case, deadline: float) -> str | None:
    if time.monotonic() > deadline:
        return "no time was left"
    with torch.no_grad(), use(case, choice):
        try:
            gpu_cases.prepare(row, peers=False, cold=0).contenders["kvloom"](0)
            torch.cuda.synchronize()
        except RuntimeError as error:  # as too much shared memory
            return str(error).splitlines()[0][:120]
    return None


if __name__ == "__main__":
    main()
