"""Numbers in messages."""


def counted(count: int, noun: str) -> str:
    """``count`` of something: "1 token", "2 tokens"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
