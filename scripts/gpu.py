"""What a GPU is needed for, in the order of its worth, each part within its time: 15 minutes together.

    python scripts/gpu.py [checks] [kernels] [tune] [model] [--out FOLDER]

``checks`` are the doors of ``tests/device`` and a part of the kernels' tests, ``kernels`` and ``model`` are
``benchmarks/gpu.py`` and ``gpu_model.py``, whose results are added to those that there are, and ``tune`` is
``gpu_tune.py``, which says what configurations of kernels to pin. It needs torch, Triton, transformers and
pytest, and no installed kvloom. A part that fails or whose time ends does not end the others; the exit status
says whether one did.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
KERNELS: Final = (
    "ties or special or significand or few_and_many or alone or decoding or replays or smoothed or queries"
)


def parts(out: Path) -> dict[str, list[tuple[list[str], int]]]:
    """Commands of each part, and the seconds of each."""
    triton = [
        str(x) for x in sorted((ROOT / "tests/ops").glob("test_triton_*.py")) if "compiles" not in x.name
    ]
    kernels = [sys.executable, "benchmarks/gpu.py", "--no-checks", "--out", str(out)]
    model = [sys.executable, "benchmarks/gpu_model.py", "--out", str(out)]
    tune = [sys.executable, "benchmarks/gpu_tune.py", "--out", str(out / "gpu_tuned.json")]
    return {
        "checks": [
            ([*TESTS, "tests/device"], 100),
            ([*TESTS, "--numprocesses", "8", "-k", KERNELS, *triton], 110),
        ],
        "kernels": [([*kernels, "prefill", "chunk"], 100), ([*kernels, "decode", "append", "latents"], 120)],
        "tune": [(tune, 140)],
        "model": [(model, 260)],
    }


def run(command: list[str], seconds: int, log: Path) -> bool:
    """Whether a command succeeds within its time; what it says is printed at its end, and kept."""
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment.pop("TRITON_INTERPRET", None)
    start, said = time.monotonic(), "ended"
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code, said = -1, "was stopped"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(*(line[:300] for line in lines[-25:]), sep="\n")
    print(f"== {log.stem} {said} with {code} after {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", help="some of checks, kernels, tune and model; all, if none is named"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of results and logs")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args()
    found = parts(args.out)
    if unknown := set(args.parts) - set(found):
        parser.error(f"expected parts, some of {[*found]}, got {sorted(unknown)}")
    chosen = {name: commands for name, commands in found.items() if not args.parts or name in args.parts}
    if args.list:
        for name, commands in chosen.items():
            for command, seconds in commands:
                print(f"{name}, {seconds} s:", *command[1:])
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "gpu_results.json"
    if not results.exists():
        shutil.copy(ROOT / "benchmarks/gpu_results.json", results)
    succeeded = [
        run(command, seconds, args.out / f"{name}_{i}.log")
        for name, commands in chosen.items()
        for i, (command, seconds) in enumerate(commands)
    ]
    sys.exit(0 if all(succeeded) else 1)


if __name__ == "__main__":
    main()
