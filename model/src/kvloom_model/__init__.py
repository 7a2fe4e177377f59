"""The small language model that kvloom is shown, tested and measured with: a folder of transformers."""

from pathlib import Path

STDLIB_4M: Path = Path(__file__).parent / "stdlib-4m"
"""4.2 million parameters, trained on Python's standard library; its ``MODEL_CARD.md`` says how well."""
