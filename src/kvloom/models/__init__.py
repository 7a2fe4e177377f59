"""The small language model that ships with kvloom, and the text it is trained and measured on.

Nothing here imports torch: only the model's folder and its corpus are named.
"""

from pathlib import Path

from kvloom.models.corpus import SourceFile, corpus_digest, corpus_files, iter_texts, split_of

__all__ = ["SourceFile", "bundled_model_path", "corpus_digest", "corpus_files", "iter_texts", "split_of"]


def bundled_model_path() -> Path:
    """The folder of the bundled model, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`."""
    return Path(__file__).parent / "stdlib-4m"
