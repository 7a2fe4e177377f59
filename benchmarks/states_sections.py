"""The section of results.md about recurrent states in pools."""

from typing import Any

from tables import table


def states_section(result: dict[str, Any]) -> str:
    """Times, then what a conversation of many finds."""
    times, chats = result["times"], result["chats"]
    share = chats["tokens_found"] / chats["tokens_that_could_be_found"]
    rows = [
        [f"finding {times['tokens']:,} tokens, over computing them", f"{times['found_over_computing']:.4f}"],
        ["computing them in pieces of 256 tokens, over at once", f"{times['pieces_over_whole']:.2f}"],
        ["bytes of the states behind one text", f"{times['state_nbytes']:,}"],
        [f"states kept, of {chats['states_of_every_piece']:,} of every piece", f"{chats['states_kept']:,}"],
        ["tokens found, of what every piece would find", f"{share:.1%}"],
    ]
    return (
        "A hybrid of four layers, of Granite 4's kinds with a hidden size of 512, in float32, one thread; "
        f"and {chats['chats']} chats of {chats['turns']} turns with one system prompt, all chats in turn, "
        "with an eighth of the bytes that the states of every 256 tokens would take.\n\n"
        + table(["", "kvloom"], rows)
    )
