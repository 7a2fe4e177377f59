"""Pictures of the documentation are those that their scripts draw."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pictures_of_how_it_works_are_current() -> None:
    drawings = runpy.run_path(str(ROOT / "scripts" / "draw_how.py"))["drawings"]()
    stale = [path.name for path, text in drawings.items() if path.read_text(encoding="utf-8") != text]
    assert len(drawings) == 4 and stale == [], "run: python scripts/draw_how.py"
