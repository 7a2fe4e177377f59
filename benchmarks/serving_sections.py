"""The sections of results.md that are of many requests at once."""

from typing import Any

from tables import table


def serving_section(result: dict[str, Any]) -> str:
    """Many requests at once."""
    workloads = {"shared": "prefix of 512 shared", "apart": "nothing shared"}
    for row in result["rows"]:
        threads = "one thread" if row["threads"] == 1 else f"{row['threads']} threads"
        row["case"] = f"{row['model']}, {workloads[row['workload']]}, {threads}"
        row["cell"] = f"{row['tokens_per_s']:,.0f} ({row['speed']:.1f}x)"
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    cells = {(row["case"], row["way"]): row["cell"] for row in result["rows"]}
    kept = {row["way"]: row["nbytes_per_token"] for row in result["rows"] if row["model"] == "random"}
    cases = dict.fromkeys(row["case"] for row in result["rows"])
    rows = [[case, *(cells[case, way] for way in ways)] for case in cases]
    memory = [[way, f"{nbytes / 1e9:.2f}"] for way, nbytes in result["memory"].items()]
    return (
        f"New tokens a second of {result['requests']} requests, and how many times that of transformers' "
        "stock continuous batching: the bundled model in float16, and 8 layers of 8 heads of 64 of random "
        "weights in float32; medians of "
        f"{result['rounds']} rounds. Padded generate takes 8 rows at a time. Bytes per token of the random "
        f"model's cache: {', '.join(f'{way} {nbytes:,.0f}' for way, nbytes in kept.items())}.\n\n"
        + table(["", *ways], rows)
        + "\n\nGigabytes at the peak of a process that answers 8 requests with 8 tokens each, where nothing "
        "is configured:\n\n" + table(["", "GB"], memory)
    )


def serving_http_section(result: dict[str, Any]) -> str:
    """Many clients of a server."""
    answers = result["clients"] * result["rounds"]
    rows = [
        [
            x["way"],
            f"{x['cpu_s']:.1f} ({x['less']:.1f}x less)",
            f"{x['wall_s']:.1f}",
            f"{x['same']} of {answers}",
        ]
        for x in result["rows"]
    ]
    return (
        f"Seconds in which a server answers {result['clients']} clients at once with 48 tokens each, after "
        "3,000 characters that all share: the bundled model in float32, medians of "
        f"{result['rounds']} rounds, each with a prefix of its own. *Same*: answers that are the first "
        "server's.\n\n" + table(["", "CPU time of the server", "until the last answer", "same"], rows)
    )


def restart_section(result: dict[str, Any]) -> str:
    """The first token of a long conversation in a new process."""
    head = ["pages", "tokens", "found", "computed", "with the store", "of it", "bytes in the store"]
    rows = [
        [
            row["kv"],
            f"{row['tokens']:,}",
            f"{row['found']:,}",
            f"{row['cold']:.1f} s",
            f"{row['warm']:.2f} s",
            f"{row['share']:.2%}",
            f"{row['megabytes']:.0f} MB",
        ]
        for row in result["rows"]
    ]
    same = "the same" if all(row["same"] for row in result["rows"]) else "other"
    return (
        "Seconds to the first token of the next turn of a conversation in a session of a new process, "
        "without a store and with one in a folder: a Llama of six layers with 8 query and 2 key/value heads "
        f"of 64, float32, {same} tokens after it.\n\n" + table(head, rows)
    )


def agents_section(result: dict[str, Any]) -> str:
    """Turns of agents with sessions and without."""
    head = ["pages", "found without", "found with sessions", "first token without", "with", "of it"]
    rows = [
        [
            row["kv"],
            f"{row['without']['found']:.0%}",
            f"{row['with']['found']:.0%}",
            f"{row['without']['seconds']:.3f} s",
            f"{row['with']['seconds']:.3f} s",
            f"{row['with']['seconds'] / row['without']['seconds']:.2f}",
        ]
        for row in result["rows"]
    ]
    same = "the same" if all(row["same"] for row in result["rows"]) else "other"
    return (
        f"Eight agents take {result['turns']} turns of 64 new tokens each after prompts of 512, and others "
        "ask between them with more tokens than there are pages for. Of the tokens of earlier turns, those "
        "that were found; medians of the seconds to the first token of a turn; a Llama of six layers in "
        f"float32, {same} tokens with sessions of agents and without.\n\n" + table(head, rows)
    )


def session_drafts_section(result: dict[str, Any]) -> str:
    """Sessions with drafts."""
    texts = {"copies": "copies", "other": "copies nothing", "json": "objects of a schema"}
    ways = [x for x in dict.fromkeys(x for row in result["rows"] for x in row["over"]) if x != "session"]
    head = ["text", "requests", "session", *ways, "drafted by lookup", "accepted", "steps"]
    rows = []
    for row in result["rows"]:
        over = [f"{row['over'][x]:.2f}x" if x in row["over"] else "" for x in ways]
        rows.append(
            [
                f"{texts[row['text']]}, {row['dtype']}",
                str(row["requests"]),
                f"{row['speeds']['session']:.1f}",
                *over,
                *(f"{row[x]:,}" for x in ("drafted", "accepted", "steps")),
            ]
        )
    return (
        "Tokens a second of decoding in a session without drafts, and how many times that with them and with "
        f"transformers' own prompt lookup of {result['lookup']} tokens (`generate`, DynamicCache, one "
        f"request): random Llamas of {result['parameters'] / 1e6:,.0f} million parameters, packed, one "
        f"thread, medians of {result['rounds']} rounds, one round of 64 requests. Text that copies is what "
        "the prompt has, but for one token in twenty. Objects have keys of 18 to 31 characters, which the "
        "grammar forces.\n\n" + table(head, rows)
    )
