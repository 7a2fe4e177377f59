"""Measures attention in many configurations on a CUDA device; keeps the fastest of each case in a file.

``kvloom.ops.impl.triton.configs.tuned(read_tuned(path, device))`` uses them; nothing does by itself. Prints
one JSON line: the time of the pinned configuration over that of the fastest.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gpu_cases
import torch
from gpu import seconds


def candidates(is_split: bool) -> Iterator[tuple[int, ...]]:
    """Rows, tokens, warps, stages and programs worth a look."""
    if is_split:
        yield from itertools.product((8, 16), (16, 32), (1, 2), (3, 5), (6, 8))
    else:
        yield from itertools.product((64, 128), (32, 64), (4, 8), (2, 3), (1, 2))


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases")
    parser.add_argument("--out", type=Path, default=Path("kvloom_tuned.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_tune measures kernels on a CUDA device, and there is none: no figure was taken")
    from kvloom.ops.impl.triton.configs import Case, Config, pinned, tuned, write_tuned

    batch, context = (2, 512) if args.quick else (64, 4096)
    best, gains = {}, {}
    for (model, ratio), (kind, quant) in itertools.product(gpu_cases.MODELS.items(), gpu_cases.KINDS.items()):
        for what in ("decode", "prefill"):
            rows = batch if what == "decode" else 1
            work = gpu_cases.prepare(gpu_cases.Case(what, model, kind, rows, context), peers=False)
            case = Case(what == "decode", 2, 0 if quant is None else quant.bits, gpu_cases.HEAD_DIM, ratio)
            times = {}
            for config in (pinned(case), *(Config(*x) for x in candidates(case.is_split))):
                with torch.no_grad(), tuned({case: config}):
                    try:
                        times[config] = seconds(work.contenders["kvloom"], work.turns)
                    except RuntimeError:  # too much shared memory for this device
                        continue
            best[case] = min(times, key=lambda x: times[x])
            gains[f"{model} {kind} {what}"] = round(times[pinned(case)] / times[best[case]], 3)
    write_tuned(args.out, torch.cuda.get_device_name(), best)
    print(json.dumps({"figure": "gpu_tune", "pinned_over_fastest": gains}))


if __name__ == "__main__":
    main()
