"""What transformers' manager is given in the place of a model that has recurrent states, while it is made."""

from typing import Any


class Attending:
    """In the place of a model or its configuration, for a moment: all layers attend to all tokens.

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
