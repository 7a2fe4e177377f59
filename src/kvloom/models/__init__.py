"""The small language model that is installed with kvloom, and the text it is trained and measured on.

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


def bundled_model_path() -> Path:
    """The folder of the bundled model, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`.

    Raises:
        ModuleNotFoundError: ``kvloom-model`` is not installed, which pip installs with kvloom.
    """
    from kvloom_model import STDLIB_4M

    return STDLIB_4M
