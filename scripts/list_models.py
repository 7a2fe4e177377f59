"""Write the table of docs/models.md: what each family of transformers keeps, and which uses it allows."""

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvloom.integrations.transformers.supports import USES, Support
from kvloom.planning.making import AUTO_CLASSES, AUTO_CLASSES_OF_BOTH
from kvloom.planning.supports import support_of_config

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- written by scripts/list_models.py -->\n", "<!-- end -->\n"
HEAD = "| `model_type` | layers keep | " + " | ".join(f"`{use}`" for use in USES) + " |\n"


def families() -> list[str]:
    """Names of the families that generate text, or have an encoder and a decoder and generate."""
    return [name for name, kind in CONFIG_MAPPING.items() if _generates_text(kind) or _has_both(kind)]


def _generates_text(kind: Any) -> bool:
    return any(kind in x._model_mapping for x in AUTO_CLASSES)


def _has_both(kind: Any) -> bool:
    found = [x._model_mapping[kind] for x in AUTO_CLASSES_OF_BOTH if kind in x._model_mapping]
    return any(x.can_generate() for x in found) and kind().is_encoder_decoder


def support(name: str) -> Support | None:
    """What a family keeps and allows by its default configuration; ``None`` if that makes no model."""
    try:
        return support_of_config(CONFIG_MAPPING[name]())
    except Exception:  # of the configuration itself, too, whose defaults may contradict one another
        return None


def row(name: str, found: Support, reasons: list[str]) -> str:
    """Row of a family; reasons that are new are appended to ``reasons``."""
    cells = []
    for answer, why in found.answers().values():
        why = why.replace(found.model, "it").replace(
            f"transformers {transformers.__version__}", "transformers"
        )
        if why and why not in reasons:
            reasons.append(why)
        cells.append(f"{answer}[^{reasons.index(why) + 1}]" if why else answer)
    keeps = "; ".join(f"{count} {words}" for words, count in found.layers.items())
    return f"| `{name}` | {keeps or 'nothing'} | {' | '.join(cells)} |\n"


def table(names: Sequence[str]) -> str:
    """The table of some families, and the reasons below it."""
    reasons: list[str] = []
    found: dict[str, Any] = {name: support(name) for name in names}
    rows = [row(name, x, reasons) for name, x in sorted(found.items()) if x is not None]
    unknown = sorted(name for name, x in found.items() if x is None)
    notes = [f"[^{i}]: {why}\n" for i, why in enumerate(reasons, 1)]
    said = f"With transformers {transformers.__version__}, {len(rows)} families by default configurations.\n"
    left = "Default configurations of which no model can be made here: " + ", ".join(
        f"`{x}`" for x in unknown
    )
    rule = "| --- " * (2 + len(USES)) + "|\n"
    return f"\n{said}\n{HEAD}{rule}{''.join(rows)}\n{left}.\n\n{''.join(notes)}\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(families()) + END + rest.split(END)[1], encoding="utf-8")
