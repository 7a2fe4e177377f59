"""llama.cpp, through llama-cpp-python: see ``common.py``; ``kind``, ``flash`` and ``form`` of a cache."""

import ctypes
from pathlib import Path

import llama_cpp as L
import numpy as np
from common import go_on, request

KINDS = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}


@L.llama_log_callback
def silent(level, text, user):
    pass


def decode(context, tokens, start):
    batch = L.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, start + i
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[i] = i == len(tokens) - 1
    result = L.llama_decode(context, batch)
    L.llama_batch_free(batch)
    assert result == 0, result


def load(context, path, form, count):
    """Load a file; returns whether all of it was taken."""
    data = Path(path).read_bytes()
    found = (ctypes.c_int32 * 4096)()
    n = ctypes.c_size_t(0)
    if form == "state":
        held = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        return L.llama_state_seq_set_data(context, held, len(data), 0) == len(data)
    if form == "context":
        return (
            L.llama_state_load_file(context, path.encode(), found, 4096, ctypes.byref(n)) and n.value == count
        )
    taken = L.llama_state_seq_load_file(context, path.encode(), 0, found, 4096, ctypes.byref(n))
    return taken == len(data) and n.value == count


def save(context, path, form, tokens):
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    if form == "state":
        size = L.llama_state_seq_get_size(context, 0)
        held = (ctypes.c_uint8 * size)()
        count = L.llama_state_seq_get_data(context, held, size, 0)
        Path(path).write_bytes(bytes(held[:count]))
    elif form == "context":
        assert L.llama_state_save_file(context, path.encode(), ids, len(tokens))
    else:
        assert L.llama_state_seq_save_file(context, path.encode(), 0, ids, len(tokens))


def main():
    wanted = request()
    L.llama_backend_init()
    L.llama_log_set(silent, ctypes.c_void_p(0))
    model = L.llama_model_load_from_file(
        (wanted["folder"] + "/model.gguf").encode(), L.llama_model_default_params()
    )
    p = L.llama_context_default_params()
    p.n_ctx, p.n_batch, p.n_threads, p.n_threads_batch = 512, 512, 1, 1
    p.type_k = p.type_v = KINDS[wanted["kind"]]
    p.flash_attn_type = int(wanted["flash"])
    context = L.llama_init_from_model(model, p)
    assert context
    if "load" in wanted:
        assert load(context, wanted["load"], wanted["form"], wanted["start"]), "the file was not taken"
    else:
        decode(context, wanted["prompt"], 0)
    if "save" in wanted:
        save(context, wanted["save"], wanted["form"], wanted["tokens"])
    size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))

    def step(token, position):
        decode(context, [token], position)
        return np.ctypeslib.as_array(L.llama_get_logits_ith(context, -1), shape=(size,)).copy()

    go_on(step, wanted)


main()
