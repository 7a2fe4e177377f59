"""Digests of a model, written from docs/store-format.md alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
import xxhash
from oracles.language_models import make_model

from kvloom.integrations.transformers.fingerprint.module_reader import behavior_digest
from kvloom.integrations.transformers.pool.identity import fingerprint_of
from kvloom.integrations.transformers.smoothing import smoothing_of

UNUSED = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def spelled(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_of_a_model_are_those_of_the_document(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    found = fingerprint_of(model, "int8,smooth=none")
    config = {name: x for name, x in model.config.to_dict().items() if name not in UNUSED}
    assert found.config == hashlib.sha256(spelled(config).encode()).hexdigest()
    rope = {name: getattr(model.config, name, None) for name in ROPE}
    assert found.rope == spelled({name: x for name, x in rope.items() if x is not None})
    weights = b"kvloom weights\0"
    for name, x in sorted(model.state_dict().items()):
        data = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        weights += f"{name} {x.dtype} {list(x.shape)} ".encode() + xxhash.xxh3_128_digest(data)
    assert found.weights == hashlib.sha256(weights).hexdigest()
    assert found.behavior == behavior_digest(model)
    fields = vars(found) | {"layers": None}
    layer = {
        "heads": found.layers[0].heads,
        **{
            side: {
                "bits": 8,
                "dtype": str(dtype).removeprefix("torch."),
                "group": getattr(found.layers[0], side).group,
                "head_dim": model.config.head_dim,
                "scale_dtype": getattr(found.layers[0], side).scale_dtype,
            }
            for side in ("key", "value")
        },
    }
    fields = {
        x: fields[x] for x in ("attention", "behavior", "config", "dtype", "rope", "rotation", "weights")
    }
    text = spelled(fields | {"layers": [[len(found.layers), layer]]})
    assert found.digest == hashlib.sha256(b"kvloom fingerprint\0" + text.encode()).digest()


def test_the_digest_of_smoothing_is_that_of_the_document() -> None:
    model = make_model("kvloom")
    words = []
    for layer in smoothing_of(model):
        own, offset = layer.smoothing, layer.smoothing.offset
        arrays = (
            [own.gain] if offset is None else [own.gain, offset.mean, offset.channels, offset.frequencies]
        )
        data = b"".join(str(tuple(x.shape)).encode() + x.numpy().tobytes() for x in arrays)
        words.append(hashlib.sha256(data).hexdigest()[:32])
    assert (
        fingerprint_of(model, "int8").smoothing == hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]
    )
    assert not fingerprint_of(model).smoothing
