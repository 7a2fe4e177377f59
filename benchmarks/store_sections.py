"""The sections of results.md that are of stores."""

from typing import Any

from tables import table


def store_section(result: dict[str, Any]) -> str:
    """A prefix in a store."""
    rows = [
        [
            x["kind"],
            f"{x['file_bytes'] / 1e6:.1f}",
            f"{x['computed_ms']:.0f}",
            f"{x['memory']:.1f}x",
            f"{x['files']:.1f}x",
            f"{x['verified']:.0%}",
            f"{x['writing']:+.1%}",
            f"{x['commit_ms']:.1f}",
        ]
        for x in result["rows"]
    ]
    reads = [
        [
            " x ".join(map(str, x["geometry"])),
            f"{x['file_bytes'] / 1e6:.1f}",
            f"{x['read_ms']:.1f}",
            f"{x['verified']:.0%}",
        ]
        for x in result["reads"]
    ]
    head = ["", "MB", "computed, ms", "memory", "files", "verified", "writing", "commit, ms"]
    return (
        f"The first token after a prompt of {result['tokens']:,} tokens of 4 layers of 8 heads of 64: "
        "computed, and how many times sooner it comes where a pool has the prompt in memory, and where a new "
        "one reads it from local files. *Verified*: the time of reading the files, by that of reading and "
        "verifying them. *Writing*: what writing the prompt in the background adds to the "
        f"{result['steps']} decode steps after `commit`, which takes as long as the last column says. XXH3 "
        f"reads {result['checksum_gb_per_s']:.1f} GB/s. Medians of {result['rounds']} rounds.\n\n"
        + table(head, rows)
        + "\n\nReads alone, of int8 pages of as many tokens in 8 MB files. *Read* keeps all that it reads, "
        "as the store does.\n\n" + table(["layers x heads x head dim", "MB", "read, ms", "verified"], reads)
    )


def slow_store_section(result: dict[str, Any]) -> str:
    """Prompts above stores that are slow, or hold much."""
    rows = [
        [
            f"{x['latency']:g}",
            f"{x['runs']:,}",
            f"{x['opening_s']:.2f}",
            f"{x['known']:.2f}",
            f"{x['found']}",
            f"{x['unknown']:.2f}",
            f"{1e3 * x['begin_s']:.1f}",
            f"{1e3 * x['longest_s']:.1f}",
        ]
        for x in result["rows"]
    ]
    head = ["latency, s", "runs", "opening, s", "known", "found", "unknown", "begin, ms", "longest, ms"]
    return (
        f"A prompt of {result['tokens']} tokens, which takes {result['computing_ms']:.0f} ms to compute, "
        "above a store in memory that has some runs, and each of whose requests takes as long as is said. "
        "Three pools are opened in sequence; each begins with a prompt that the store has, and then "
        f"with {result['rounds']} that it has not. *Known* and *unknown*: from `begin` to the end of the "
        "prefill, by that of a pool without a store right after, medians of unknown ones. *Begin*: `begin` "
        "alone of unknown prompts, the median and the longest.\n\n" + table(head, rows)
    )
