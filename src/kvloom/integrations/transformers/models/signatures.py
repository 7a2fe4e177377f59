"""Arguments of ``forward`` of classes of modules."""

import inspect
from functools import cache
from typing import Any


@cache
def parameters_of(kind: Any) -> dict[str, Any]:
    """Names and defaults of the arguments of ``forward`` of a class of modules.

    A ``forward`` that passes ``*args`` on has those of its parent.
    """
    own = [vars(owner)["forward"] for owner in kind.__mro__ if "forward" in vars(owner)]
    found = [[*inspect.signature(x).parameters.values()][1:] for x in own]
    named = (x for x in found if all(y.kind is not y.VAR_POSITIONAL for y in x))
    return {x.name: x.default for x in next(named, found[0])}
