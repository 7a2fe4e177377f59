"""Inputs of a model with vision for a chat with pictures, and the numbers by which its pages are found."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from torch import Tensor
from transformers import AutoProcessor

from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers import content_of, summary_of
from kvloom.integrations.transformers.models.content import placeholders_of
from kvloom.integrations.transformers.models.loading import is_seeing
from kvloom.integrations.transformers.models.text_config import text_config_of

_LOG: Final = logging.getLogger("kvloom")

_NO_TOKEN: Final = 1 << 62
"""Bit that is set in numbers that stand for pictures; no token id has it."""


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """Prompt of a chat with pictures; T tokens.

    Attributes:
        tokens: T token ids, including placeholders of pictures.
        known_as: T numbers by which pages are found: token ids, and for placeholders parts of a digest of all
            pictures.
        first: Index of the first placeholder.
        last: Index of the last placeholder.
        inputs: Inputs of the model's forward beside tokens, on the CPU.
    """

    tokens: list[int]
    known_as: list[int]
    first: int
    last: int
    inputs: Mapping[str, Any]

    def inputs_behind(self, num_found: int) -> dict[str, Any]:
        """Inputs for a cache that has ``num_found`` tokens, and no picture in part.

        If it has all pictures, only token types remain, and the grids from which positions are made.
        """
        if num_found <= self.first:
            return dict(self.inputs)
        return {
            name: x for name, x in self.inputs.items() if _is_of_types(name) or name.endswith("_grid_thw")
        }


def processor_of(model: Any, path: Path) -> Any:
    """The processor of a model with vision; ``None`` for another model, or with a warning if it cannot load.

    Args:
        model: Model from ``load_model``.
        path: Its folder.
    """
    if not is_seeing(model.config):
        return None
    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged folder, or a library that is missing, makes it raise
        _LOG.warning("the model answers chats of text alone, without pictures: %s", summary_of(error))
        return None


class Vision:
    """Factory of prompts for chats with pictures, by a model's processor; threads may share it.

    Args:
        model: Model with vision.
        processor: Its processor.
        tokenizer: Tokenizer with the same tokens as the processor's.

    Raises:
        UnsupportedError: they do not fit, or have no placeholder token for a picture.
    """

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        self._processor, self._lock = processor, threading.Lock()
        own = getattr(processor, "tokenizer", None)
        if own is None or own.get_vocab() != tokenizer.get_vocab():
            raise UnsupportedError("the processor must have the tokens of the tokenizer, got others")
        placeholders = {**placeholders_of(model.config), **placeholders_of(text_config_of(model))}
        self._placeholders = frozenset(placeholders)
        mark = getattr(processor, "image_token", None)
        if not placeholders or not isinstance(mark, str):
            raise UnsupportedError("model and processor must name the token for a picture, got none")
        self._mark = mark
        known = [own.convert_ids_to_tokens(x) for x in placeholders if x < len(own)]
        self._marks = {self._mark, *filter(None, known)}

    def prompt_of(
        self, text: str, messages: Iterable[Mapping[str, Any]], images: Sequence[Any]
    ) -> PicturePrompt:
        """The prompt of a chat.

        Args:
            text: Text of the chat by the chat template.
            messages: Messages of the chat.
            images: Results of ``decoded``, in the order of the text.

        Raises:
            ArgumentError: a text has a placeholder of a picture, the template ignores a picture, or the
                processor does not accept one.
        """
        self._expect_no_mark(messages)
        if (count := text.count(self._mark)) != len(images):
            raise ArgumentError(
                f"messages must have pictures where the model's chat template reads them, got {count} of "
                f"{len(images)} read"
            )
        try:
            with self._lock:
                made = self._processor(
                    text=[text], images=[*images], add_special_tokens=False, return_tensors="pt"
                )
        except Exception as error:  # whatever pictures make a processor raise
            raise ArgumentError(
                f"messages must have pictures that the model's processor takes: {summary_of(error)}"
            ) from error
        inputs = {name: x for name, x in made.items() if name not in ("input_ids", "attention_mask")}
        tokens = made["input_ids"][0].tolist()
        digest = _digest_of(inputs, tokens)
        where = [i for i, token in enumerate(tokens) if token in self._placeholders]
        if not where or not digest:
            raise ArgumentError(
                "messages must have pictures that the model's processor takes: it left them out"
            )
        parts = cycle(_NO_TOKEN | int(digest[k : k + 16], 16) >> 2 for k in range(0, len(digest), 16))
        known_as = [next(parts) if token in self._placeholders else token for token in tokens]
        return PicturePrompt(tokens, known_as, where[0], where[-1], inputs)

    def _expect_no_mark(self, messages: Iterable[Mapping[str, Any]]) -> None:
        for i, message in enumerate(messages):
            for j, part in enumerate(message["content"]):
                for mark in self._marks:
                    if mark in part.get("text", ""):
                        raise ArgumentError(
                            f"messages[{i}].content[{j}].text must be without {mark!r}, which is "
                            f"a placeholder of the model"
                        )


def _digest_of(inputs: Mapping[str, Any], tokens: Sequence[int]) -> str:
    """Digest of a model's inputs beside tokens, as ``content_of``, independent of the text's length."""
    return content_of(
        {name: x for name, x in inputs.items() if not (_is_of_types(name) and _is_of_tokens(x, tokens))}
    )


def _is_of_types(name: str) -> bool:
    return name.endswith("token_type_ids")


def _is_of_tokens(types: Any, tokens: Sequence[int]) -> bool:
    """Whether types ``[1, T]`` follow from the tokens: equal token ids have equal types."""
    if not isinstance(types, Tensor) or types.shape != (1, len(tokens)):
        return False
    pairs = {*zip(tokens, types[0].tolist(), strict=True)}
    return len(pairs) == len({*tokens})
