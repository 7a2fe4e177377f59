"""Why the pages of a trace are missed, by capacity, and how many pages more would have kept what was evicted.

``KVLOOM_TRACE`` names a file in Mooncake's format; without it a trace is made up. Predicted: causes sum to
the misses, what is evicted shrinks with capacity, and the rest does not change. Prints one JSON line.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import traces

from kvloom.simulation.trace import BLOCK_TOKENS
from kvloom.tracing.recording import causes_of, requests_of
from kvloom.tracing.replay import Lookup, read_lookups, replay

CAPACITIES = (1_000_000, 3_000_000, 10_000_000)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    given = os.environ.get("KVLOOM_TRACE")
    if given and not quick:
        lookups, _ = read_lookups(Path(given))
    else:
        made = traces.agents(200 if quick else 4000)
        lookups = [Lookup(x.timestamp / 1000, "", x.input_length, x.hash_ids) for x in made]
    rows = []
    for capacity in CAPACITIES[:1] if quick else CAPACITIES:
        start = time.perf_counter()
        events = replay(lookups, capacity // BLOCK_TOKENS, BLOCK_TOKENS)
        seconds = time.perf_counter() - start
        requests = requests_of(events.lines(tokens=False)).values()
        more = [x["more"] for request in requests for x in request.misses.values() if "more" in x]
        rows.append({
            "capacity": capacity,
            "asked": sum(len(x.nodes) for x in requests),
            "found": sum(x.found for x in requests),
            "causes": causes_of(requests),
            "more_tokens": BLOCK_TOKENS * median(more) if more else 0,
            "blocks_per_s": sum(len(x.nodes) for x in requests) / seconds,
        })  # fmt: skip
    name = Path(given).stem if given and not quick else "agents"
    print(json.dumps({"figure": "causes", "trace": name, "rows": rows}))


if __name__ == "__main__":
    main()
