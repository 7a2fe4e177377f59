#!/usr/bin/env bash
# triton 3.6.0, the one of torch 2.11: its interpreter runs no loop with numpy 2.4, neither over an argument nor over a
# number that was loaded.
#
# Seen on Linux x86-64 with Python 3.11, torch 2.13.0, numpy 2.4.6: "only 0-dimensional arrays can be converted to Python
# scalars", as bounds are arrays of one element. triton 3.9.0 runs it with the same numpy. Exits 1 once the loop runs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.13.0
"$folder/env/bin/pip" install --quiet --no-deps triton==3.6.0
"$folder/env/bin/pip" install --quiet numpy==2.4.6
cat > "$folder/ask.py" <<'PYTHON'
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def total_below(out, number):
    total = 0
    for i in range(0, number):
        total += i
    tl.store(out, total)


out = torch.zeros(1, dtype=torch.int64)
try:
    total_below[(1,)](out, 4)
except Exception as error:
    print(f"triton {triton.__version__}:", error)
    sys.exit("0-dimensional" not in str(error))
print(f"triton {triton.__version__}:", out.tolist())
sys.exit(1)
PYTHON
"$folder/env/bin/python" "$folder/ask.py"
