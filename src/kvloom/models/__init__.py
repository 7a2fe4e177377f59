"""The small language model that ships with kvloom, and the text it is trained and measured on.

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
    """The folder of the bundled model, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`."""
    return Path(__file__).parent / "stdlib-4m"
