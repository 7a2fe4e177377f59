"""Whether a commit's message can be read later: ``area: verb object``, at most 72 characters, and a body.

Git calls it with the file of the message, once ``.venv/bin/pre-commit install`` has made the hook.
"""

import re
import sys
from pathlib import Path

MOST = 72
AREAS = re.compile(r"[a-z][\w ./-]*(, [a-z][\w ./-]*)*: \S")
MADE_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def problems(message: str) -> list[str]:
    """A sentence for each thing that is wrong with a message; lines that begin with ``#`` are Git's own."""
    lines = [line.rstrip() for line in message.partition("\n# --------")[0].splitlines()]
    subject, *body = [line for line in lines if not line.startswith("#")] or [""]
    if subject.startswith(MADE_BY_GIT):
        return []
    found = []
    if len(subject) > MOST:
        found.append(f"the subject must have at most {MOST} characters, got {len(subject)}")
    if not AREAS.match(subject):
        found.append(f"the subject must be `area: verb object`, got {subject!r}")
    elif subject.endswith("."):
        found.append("the subject must end without a period")
    if body and body[0]:
        found.append("the line after the subject must be empty")
    if not any(body):
        found.append("the body must say why, and what proves it, got none")
    return found


if __name__ == "__main__":
    said = problems(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print("\n".join(said), end="\n" if said else "")
    sys.exit(bool(said))
