"""Replacements of objects that transformers' continuous batching expects."""

from typing import Any

from kvloom.integrations.transformers.stand_in import StandIn


class NoSectors:
    """Replacement of transformers' pool of sectors; pages here are not grouped into sectors."""

    def try_to_free_sectors(self) -> None:
        """Do nothing."""


class Attending(StandIn):
    """Replacement of a model or its configuration, in which all layers attend to all tokens.

    It is used while a manager is made. transformers reads the kinds of layers to choose an attention of its
    own, which is not used here, and refuses kinds that it does not know.
    """

    @property
    def attending(self) -> Any:
        """The model or the configuration."""
        return self._model

    @property
    def config(self) -> "Attending":
        """Replacement of the model's configuration."""
        return Attending(self.attending.config)

    def get_text_config(self) -> "Attending":
        """Replacement of the text configuration."""
        return Attending(self.attending.get_text_config())

    @property
    def layer_types(self) -> None:
        """Kinds of layers: ``None``."""

    @property
    def sliding_window(self) -> None:
        """Sliding window: ``None``."""

    def eval(self) -> "Attending":
        """Call the model's ``eval``, and return this."""
        self.attending.eval()
        return self
