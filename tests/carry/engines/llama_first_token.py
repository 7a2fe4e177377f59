"""Seconds until llama.cpp has the token behind a prompt: by its own prefill, or behind a file that it loads.

A request has ``folder``, ``tokens``, and either ``save``, where to save all but the last, or ``load``.
"""

import ctypes
import json
import sys
import time

import llama_cpp as L
from common import request

BATCH = 512


@L.llama_log_callback
def silent(level, text, user):
    pass


def decode(context, tokens, start):
    """Compute tokens in batches; the likeliest token after them."""
    for first in range(0, len(tokens), BATCH):
        part = tokens[first : first + BATCH]
        batch = L.llama_batch_init(len(part), 0, 1)
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i] = token, start + first + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(part) - 1
        result = L.llama_decode(context, batch)
        L.llama_batch_free(batch)
        assert result == 0, result
    logits = L.llama_get_logits_ith(context, -1)
    return max(range(1000), key=lambda i: logits[i])


def main():
    wanted = request()
    L.llama_backend_init()
    L.llama_log_set(silent, ctypes.c_void_p(0))
    path = (wanted["folder"] + "/model.gguf").encode()
    model = L.llama_model_load_from_file(path, L.llama_model_default_params())
    held, last = wanted["tokens"][:-1], wanted["tokens"][-1:]
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_threads, p.n_threads_batch = len(held) + 64, BATCH, 1, 1
    p.type_k = p.type_v = 1
    p.flash_attn_type = 1
    context = L.llama_init_from_model(model, p)
    assert context
    count, room = ctypes.c_size_t(), (ctypes.c_int32 * len(held))(*held)
    cpu, wall = time.process_time(), time.perf_counter()
    if "load" in wanted:
        assert L.llama_state_seq_load_file(
            context, wanted["load"].encode(), 0, room, len(held), ctypes.byref(count)
        )
    else:
        decode(context, held, 0)
        before = time.process_time(), time.perf_counter()
        assert L.llama_state_seq_save_file(context, wanted["save"].encode(), 0, room, len(held))
        cpu += time.process_time() - before[0]  # saving does not count
        wall += time.perf_counter() - before[1]
    token = decode(context, last, len(held))
    spent = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    sys.stdout.write(json.dumps({**spent, "token": token}))


main()
