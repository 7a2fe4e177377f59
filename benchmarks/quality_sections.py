"""The sections of results.md about what caches cost in quality."""

from typing import Any

from tables import left_out, table


def quality_section(result: dict[str, Any]) -> str:
    """Section on the loss by quantization, in text."""
    rows = [
        [
            row["contender"], str(row["group"] or ""), str(row["unquantized"] or ""),
            f"{row['nbytes_per_token']:,.0f}", f"{row['perplexity']:.3f}", f"{row['mean_kl']:.1e}",
            f"{row['agreed']:.1%}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"The bundled model on {result['tokens']:,} tokens of held-out text, fed in pieces so that "
        "attention reads what the cache kept. *Raw*: last tokens that a cache leaves unquantized."
        f"{left_out(result)}\n\n"
        + table(
            ["cache", "group", "raw", "bytes/token", "perplexity", "mean KL in nats", "same choices"], rows
        )
    )


def quality_length_section(result: dict[str, Any]) -> str:
    """Long texts, other texts, and other keys."""
    names = list(dict.fromkeys(row["contender"] for row in result["rows"]))[1:]
    cases: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        case = row["keys"], row["text"], f"{row['window']:,}"
        cases.setdefault(case, {})[row["contender"]] = row
    rows = [
        [*case, f"{next(iter(found.values()))['perplexity']:.2f}"]
        + [
            f"{found[name]['mean_kl']:.1e}, {found[name]['agreed']:.1%}, {found[name]['change']:+.1%}"
            for name in names
        ]
        for case, found in cases.items()
    ]
    return (
        "The bundled model decodes, token by token after a prompt of half of each text. KL in nats, share "
        f"of the same choices, change of perplexity, of {result['rows'][0]['tokens']:,} tokens or some more. "
        "*Perplexity*: of DynamicCache with the same keys, with which others are compared."
        f"{left_out(result)}\n\n" + table(["keys", "text", "tokens", "perplexity", *names], rows)
    )


def retrieval_section(result: dict[str, Any]) -> str:
    """Answers from far back."""
    rows = [
        [
            row["keys"], row["contender"], f"{row['nbytes_per_token']:,.0f}", f"{row['exact']:.1%}",
            *("" if share is None else f"{share:.1%}" for share in row["by_distance"]),
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return (
        f"A small model trained on key-value recall answers {result['questions']:,} questions in texts of "
        f"{result['tokens']:,} tokens, decoding: share of answers of which all symbols are right, of all and "
        "by the tokens between a record and its question. Each *keys* is a model of its own, to be compared "
        f"with its {result['stock']}.{left_out(result)}\n\n"
        + table(["keys", "cache", "bytes/token", "exact", *(f"from {x}" for x in result["farther"])], rows)
    )


def formats_section(result: dict[str, Any]) -> str:
    """Changes of a 4-bit format."""
    rows = [
        [
            row["format"], f"{row['nbytes_per_token']:,.0f}", f"{row['mean_kl']:.1e}",
            f"{row['worst_head']:.1%}", f"{row['mean_kl_outliers']:.1e}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    head = ["change", "bytes/token", "mean KL in nats", "worst head", "mean KL, outliers"]
    return (
        f"4-bit formats simulated in plain torch on {result['tokens']:,} held-out tokens, groups of 64 if "
        f"not said; plain int4 as stored has a KL of {result['int4']:.1e}.\n\n{table(head, rows)}\n\n"
        + _stored(result)
    )


def _stored(result: dict[str, Any]) -> str:
    """Section on unchanged caches."""
    rows = [
        [
            row["cache"], f"{row['nbytes_per_token']:,.0f}", f"{row['perplexity']:+.2%}",
            f"{row['mean_kl']:.1e}", f"{row['agreed']:.1%}", f"{row['error']:.1%}",
            f"{row['mean_kl_outliers']:.1e}", f"{row['error_outliers']:.1%}",
        ]
        for row in result["stored"]
    ]  # fmt: skip
    head = ["cache", "bytes/token", "perplexity", "mean KL", "same choices", "error"]
    return (
        "Unchanged caches, on the same tokens. *Error*: of attention's output by its norm, with exact "
        "queries, root mean square over heads and layers. *Raw*: last tokens left unquantized, as in "
        "kvloom's int4, 64 unless another number is said. Bytes are those of a token in a text of 8,192, and "
        "errors those of 32 tokens at a time. *Outliers*: the copy of the model whose keys have some."
        f"{left_out(result)}\n\n" + table([*head, "mean KL, outliers", "error, outliers"], rows)
    )
