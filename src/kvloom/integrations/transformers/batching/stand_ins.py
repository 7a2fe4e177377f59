"""What transformers is given in the place of what it asks for."""

from typing import Any


class NoSectors:
    """In the place of transformers' pool of sectors, into which these pages are not grouped."""

    def try_to_free_sectors(self) -> None:
        """Nothing to do."""


class Attending:
    """In the place of a model or its configuration while a manager is made: all layers attend to all tokens.

    transformers asks which kind each layer is to choose between ways of its own to attend, none of which is
    taken here, and refuses kinds that it does not know.

    Attributes:
        attending: The model or the configuration.
    """

    def __init__(self, attending: Any) -> None:
        self.attending = attending

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attending, name)

    @property
    def config(self) -> "Attending":
        """Of the model."""
        return Attending(self.attending.config)

    def get_text_config(self) -> "Attending":
        """Of the configuration."""
        return Attending(self.attending.get_text_config())

    @property
    def layer_types(self) -> None:
        """Of the configuration: none that is named."""

    @property
    def sliding_window(self) -> None:
        """Of the configuration."""

    def eval(self) -> "Attending":
        """As the model's."""
        self.attending.eval()
        return self
