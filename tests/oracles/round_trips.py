"""What is saved and loaded again, in each way that Python and torch have."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch


def by_torch(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))  # noqa: S301 (our own)


def by_protocol_5(x: Any) -> Any:
    """In pieces, by the pickler of Python as well, which looks ahead."""
    file = io.BytesIO()
    pickle._Pickler(file, protocol=5).dump(x)
    assert pickle.loads(file.getvalue()) is not None  # noqa: S301 (our own)
    return pickle.loads(pickle.dumps(x, protocol=5))  # noqa: S301 (our own)


every_way = pytest.mark.parametrize("again", [by_torch, by_pickle, by_protocol_5])
