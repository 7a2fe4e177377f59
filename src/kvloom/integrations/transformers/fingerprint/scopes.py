"""Scopes: what pages are looked up by beside their tokens."""

import re
from typing import Final

_OF_A_STATE: Final = re.compile("\0s[0-9]+:")


def scope_of(salt: str, content: str = "", frequencies: str = "", state: str = "") -> str:
    """A scope: a key of page trees and stores under which tokens alone decide keys and values.

    It is the salt itself if the other arguments are empty. Different arguments have different scopes.

    Args:
        salt: The caller's salt.
        content: Digest of the content of placeholder tokens.
        frequencies: Name that ``DynamicRope`` gives to the frequencies.
        state: Name that ``ModelWatch`` gives to the state.
    """
    parts = (("c", content), ("f", frequencies), ("s", state))
    said = "".join(f"\0{name}{len(text)}:{text}" for name, text in parts if text)
    return salt.replace("\0", "\0\0") + said


def scope_in(scope: str, state: str) -> str | None:
    """``scope`` without ``state``; ``None`` if it is a scope of another state."""
    end = f"\0s{len(state)}:{state}" if state else ""
    rest = scope.removesuffix(end)
    is_of_state = scope.endswith(end) and not _OF_A_STATE.search(rest.replace("\0\0", ""))
    return rest if is_of_state else None
