"""The sections of results.md about recurrent states."""

from typing import Any

from tables import table


def states_section(result: dict[str, Any]) -> str:
    """Times, then what a conversation of many finds."""
    times, chats = result["times"], result["chats"]
    share = chats["tokens_found"] / chats["tokens_that_could_be_found"]
    rows = [
        [f"finding {times['tokens']:,} tokens, over computing them", f"{times['found_over_computing']:.4f}"],
        ["computing them in pieces of 256 tokens, over at once", f"{times['pieces_over_whole']:.2f}"],
        ["bytes of the states after one text", f"{times['state_nbytes']:,}"],
        [f"states kept, of {chats['states_of_every_piece']:,} of every piece", f"{chats['states_kept']:,}"],
        ["tokens found, of what every piece would find", f"{share:.1%}"],
    ]
    return (
        "A hybrid of four layers, of Granite 4's kinds with a hidden size of 512, in float32, one thread; "
        f"and {chats['chats']} chats of {chats['turns']} turns with one system prompt, all chats in turn, "
        "with an eighth of the bytes that the states of every 256 tokens would take.\n\n"
        + table(["", "kvloom"], rows)
    )


def drafts_section(result: dict[str, Any]) -> str:
    """Prompt lookup over greedy decoding."""
    head = ["model", "cache", "greedy over lookup", "forwards of greedy", "forwards with drafts"]
    rows, figures = [], {name: x for name, x in result.items() if name != "figure"}
    for name, own in figures.items():
        model, _, kv = name.rpartition(" ")
        forwards = own["forwards"]
        rows.append([
            model, kv, f"{own['greedy_over_lookup']:.2f}", str(forwards["greedy"]), str(forwards["lookup"])
        ])  # fmt: skip
    count = next(iter(figures.values()))["new_tokens"]
    return (
        "Times of greedy decoding by those of prompt lookup, which takes back recurrent states, where a "
        f"text is copied with edits: {count} new tokens, the same ones, one thread.\n\n" + table(head, rows)
    )


def session_states_section(result: dict[str, Any]) -> str:
    """Hybrids in continuous batching."""
    count, sizes = result["requests"], [*result["cases"][0]["over_session"]]
    names = ["all at once" if int(size) == count else f"in batches of {size}" for size in sizes]
    head = ["prefix that all share", *names, "answers that are the same"]
    rows = [
        [
            f"{case['prefix']:,}",
            *("{:.2f} ({:.2f} to {:.2f})".format(*case["over_session"][size]) for size in sizes),
            f"{case['same_tokens_in_last_round']} of {count}",
        ]
        for case in result["cases"]
    ]
    return (
        "Processor time of padded `generate` by that of a session, median and range of three rounds: "
        f"{count} requests of random lengths to a hybrid of four layers, of Granite 4's kinds with a hidden "
        f"size of {result['hidden']}, one thread. Batches are sorted by the lengths of their answers, which "
        "are not known before.\n\n" + table(head, rows)
    )
