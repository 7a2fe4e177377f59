"""mlx-lm: see ``common.py``; ``bits`` of a quantized cache."""

from pathlib import Path

import mlx.core as mx
import numpy as np
from common import go_on, request
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.utils import load_model


def main():
    wanted = request()
    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(wanted["folder"]))
    if "load" in wanted:
        cache = load_prompt_cache(wanted["load"])
        assert {x.offset for x in cache} == {wanted["start"]}
    else:
        bits = wanted["bits"]
        for kind in (KVCache, QuantizedKVCache):
            kind.step = wanted.get("step", kind.step)  # slots by which a buffer grows
        cache = [QuantizedKVCache(64, bits) for _ in model.layers] if bits else make_prompt_cache(model)
        mx.eval(model(mx.array([wanted["prompt"]]), cache=cache))
    if "save" in wanted:
        save_prompt_cache(wanted["save"], cache, {"of": "mlx-lm"})
    go_on(lambda token, position: np.array(model(mx.array([[token]]), cache=cache)[0, -1]), wanted)


main()
