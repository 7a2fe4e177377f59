"""Attention of llama.cpp: its operator for flash attention, in the libraries that llama-cpp-python brings.

The tokens of a head follow each other in memory, as the operator reads them. New tokens are not stored.
"""

import ctypes
import weakref
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from problem import Problem, Run
from torch import Tensor

GGML_TYPES: Final = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 30,
    "int8 g64": 8,  # Q8_0, a scale for 32 elements
    "int8 g8": 8,
    "int4 g64": 2,  # Q4_0, the same
}
"""``enum ggml_type`` by kinds of caches. Queries are float32."""
_F32, _F16 = GGML_TYPES["float32"], GGML_TYPES["float16"]
_DTYPES: Final = {_F32: torch.float32, _F16: torch.float16, GGML_TYPES["bfloat16"]: torch.bfloat16}
_OVERHEAD: Final = 1 << 20
"""Bytes of a context beside the elements of its tensors: their descriptions and a graph."""


class _Parameters(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@cache
def libraries() -> tuple[Any, Any]:
    """The library of tensors and graphs, and that of the CPU, with the types of their results."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    base, cpu = (ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu"))
    pointers = (
        base.ggml_init, base.ggml_new_tensor_4d, base.ggml_flash_attn_ext, base.ggml_new_graph,
        base.ggml_get_data, cpu.ggml_backend_cpu_init,
    )  # fmt: skip
    for function in pointers:
        function.restype = ctypes.c_void_p
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    return base, cpu


def llama(problem: Problem) -> Run:
    """``ggml_flash_attn_ext`` on a graph of one node."""
    base, cpu = libraries()
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    rows, query_heads, new, dim = problem.query.shape
    stored = problem.keys.shape[2]
    backend = pointer(cpu.ggml_backend_cpu_init())
    cpu.ggml_backend_cpu_set_n_threads(backend, ctypes.c_int(torch.get_num_threads()))

    def tensor(context: pointer, kind: int, x: Tensor) -> pointer:
        """A tensor of ``x``, of four dimensions, the last of which ggml counts first."""
        made = pointer(base.ggml_new_tensor_4d(context, ctypes.c_int(kind), *map(number, reversed(x.shape))))
        data = pointer(base.ggml_get_data(made))
        held = x.to(_DTYPES.get(kind, torch.float32)).contiguous()
        if kind in _DTYPES:
            ctypes.memmove(data, held.data_ptr(), held.nbytes)
        else:
            sizes = number(0), number(held.numel() // dim), number(dim)
            base.ggml_quantize_chunk(ctypes.c_int(kind), pointer(held.data_ptr()), data, *sizes, pointer())
        return made

    kind = GGML_TYPES[problem.kind]
    mask = torch.full((new, stored), -torch.inf).triu(stored - new + 1)[None, None] if new > 1 else None
    elements = problem.query.numel() * 2 + problem.keys.numel() * 2 + (0 if mask is None else mask.numel())
    calls: list[tuple[Any, Tensor]] = []

    def run(i: int) -> Tensor:
        graph, answer = calls[i]
        base.ggml_backend_graph_compute(backend, graph)
        return answer

    weakref.finalize(run, base.ggml_backend_free, backend)
    for _ in range(problem.copies):
        context = pointer(base.ggml_init(_Parameters(_OVERHEAD + 4 * elements, None, False)))
        weakref.finalize(run, base.ggml_free, context)
        query = tensor(context, _F32, problem.query)
        key, value = tensor(context, kind, problem.keys), tensor(context, kind, problem.values)
        hidden = pointer() if mask is None else tensor(context, _F16, mask)
        none, scale = ctypes.c_float(0), ctypes.c_float(dim**-0.5)
        out = pointer(base.ggml_flash_attn_ext(context, query, key, value, hidden, scale, none, none))
        graph = pointer(base.ggml_new_graph(context))
        base.ggml_build_forward_expand(graph, out)
        floats = ctypes.c_float * problem.query.numel()
        answer = torch.frombuffer(floats.from_address(base.ggml_get_data(out)), dtype=torch.float32)
        calls.append((graph, answer.view(rows, new, query_heads, dim).transpose(1, 2)))
    return run
