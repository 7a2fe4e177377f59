"""Blocks of a trace that caches of every policy find, by capacity, and how fast the pool replays it.

``KVLOOM_TRACE`` names a file in Mooncake's format, which is replayed forwards and backwards; traces of other
shapes are made up. Predicted: no policy beats the optimum, and LRU is bad where a cache is smaller than what
is used in turn; ours is never below LRU by more than a point. Prints one JSON line.
"""

import argparse
import json
import os
import time
from pathlib import Path

import traces

from kvloom.paging import POLICIES as OF_THE_POOL
from kvloom.simulation.replay import POLICIES, replay
from kvloom.simulation.trace import Request, read_trace

CAPACITIES = (500_000, 1_000_000, 3_000_000, 10_000_000, 20_000_000, 50_000_000)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    count = 200 if quick else 4000
    shapes: dict[str, list[Request]] = {
        "agents": traces.agents(count),
        "few examples": traces.few_shot(count),
        "at random": traces.at_random(count),
    }
    if (given := os.environ.get("KVLOOM_TRACE")) and not quick:
        requests = list(read_trace(Path(given)))
        shapes = {Path(given).stem: requests, f"{Path(given).stem}, backwards": requests[::-1], **shapes}
    rows, fastest = [], dict.fromkeys(OF_THE_POOL, 0.0)
    for name, requests in shapes.items():
        for capacity in CAPACITIES[:2] if quick else CAPACITIES:
            for policy in POLICIES:
                start = time.process_time()
                hits = replay(requests, capacity, policy)
                if policy in fastest:
                    speed = hits.blocks_asked / (time.process_time() - start)
                    fastest[policy] = max(fastest[policy], speed)
                rows.append({
                    "trace": name, "capacity": capacity, "policy": policy, "block_rate": hits.block_rate,
                })  # fmt: skip
    print(json.dumps({"figure": "simulate", "rows": rows, "blocks_per_s": fastest}))


if __name__ == "__main__":
    main()
