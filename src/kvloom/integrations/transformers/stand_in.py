"""``StandIn``: an object in place of a model, which differs from it in what its class says."""

from typing import Any


class StandIn:
    """An object with the attributes of a model, but for those of its class.

    Args:
        model: The model, or another object.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
