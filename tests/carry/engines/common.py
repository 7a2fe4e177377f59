"""What scripts share that run in an engine's own environment: a request in, greedy tokens and logits out.

A request is JSON: ``prompt`` to compute, or ``load`` for a cache that was saved; ``save`` for where to save
one before going on; ``last``, the token to go on from, ``start``, its position, and ``new``, how many tokens
to choose.
"""

import json
import sys
from pathlib import Path

import numpy as np


def request():
    """The request whose file is the first argument."""
    return json.loads(Path(sys.argv[1]).read_bytes())


def go_on(step, wanted):
    """Choose tokens greedily; ``step(token, position)`` returns logits."""
    tokens, logits, token = [], [], wanted["last"]
    for i in range(wanted["new"]):
        logits.append(np.asarray(step(token, wanted["start"] + i), np.float32))
        token = int(logits[-1].argmax())
        tokens.append(token)
    np.savez(sys.argv[1] + ".npz", tokens=tokens, logits=np.stack(logits))


def weights_of(folder):
    """Configuration and float32 weights by name, as ``given_of`` of ``test_engines.py`` saves them."""
    return json.loads(Path(folder, "config.json").read_bytes()), np.load(folder + "/weights.npz")
