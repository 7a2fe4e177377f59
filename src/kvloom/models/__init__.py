"""Small language model of the distribution ``kvloom-model``, and the text for its training and measurements.

Imports no torch: it only finds and checks model folders and the corpus.
"""

from pathlib import Path

from kvloom.models.corpus import SourceFile, corpus_digest, corpus_files, iter_texts, split_of
from kvloom.models.folder import check_model_folder

__all__ = [
    "SourceFile",
    "bundled_model_path",
    "check_model_folder",
    "corpus_digest",
    "corpus_files",
    "iter_texts",
    "split_of",
]


_IN_CHECKOUT = Path(__file__).parents[3] / "model/src/kvloom_model/stdlib-4m"


def bundled_model_path() -> Path:
    """Folder of the bundled model, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`.

    Raises:
        ModuleNotFoundError: ``kvloom-model`` is not installed, and this is no checkout with its files.
    """
    if _IN_CHECKOUT.is_dir():
        return _IN_CHECKOUT
    from kvloom_model import STDLIB_4M

    return STDLIB_4M
