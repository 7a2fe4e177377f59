"""Attention of ONNX Runtime, OpenVINO and vLLM, on caches in place. All but vLLM store the new tokens too."""

from functools import partial
from typing import Any

import torch
from problem import KINDS, Problem, Run
from torch import Tensor

SIDES = ("key", "value")


def flat(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[B, H, T, D]`` as tokens ``[B, T, H * D]``."""
    return x.transpose(1, 2).flatten(2).to(dtype).contiguous()


# --- ONNX Runtime -----------------------------------------------------------------------------------------


def onnxruntime(problem: Problem) -> Run:
    """GroupQueryAttention, past and present in one buffer; codes with a scale for each channel.

    Queries over codes are float32.
    """
    import onnxruntime as ort

    wrap = ort.OrtValue.ortvalue_from_numpy
    rows, query_heads, new, dim = problem.query.shape
    stored = problem.keys.shape[2]
    quant = KINDS[problem.kind][1]
    bits = 0 if quant is None else quant.bits
    dtype = problem.dtype if quant is None else torch.float32
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(group_query_attention(problem, bits), options)

    caches = {"key": problem.keys, "value": problem.values}
    feeds = {name: flat(x[:, :, stored - new :], dtype) for name, x in caches.items()}
    feeds["query"] = flat(problem.query, dtype)
    feeds["last"] = torch.full((rows,), stored - 1, dtype=torch.int32)
    feeds["stored"] = torch.tensor(stored, dtype=torch.int32)
    for name, x in caches.items():
        caches[name] = x.to(dtype)
        if bits:
            scale = x.abs().amax(dim=(0, 2))[:, None] / (2 ** (bits - 1) - 1)
            feeds[f"{name}_scale"], caches[name] = scale, channel_codes(x, scale, bits)
    out = torch.zeros(rows, new, query_heads * dim, dtype=dtype)
    bindings, kept = [], [out]  # bindings point to what is kept
    for _ in range(problem.copies):
        binding = session.io_binding()
        for name, x in feeds.items():
            binding.bind_ortvalue_input(name, wrap(x.numpy()))
        for name, x in caches.items():
            kept.append(x.clone())
            memory = wrap(kept[-1].numpy())
            binding.bind_ortvalue_input(f"past_{name}", memory)
            binding.bind_ortvalue_output(f"present_{name}", memory)
        binding.bind_ortvalue_output("out", wrap(out.numpy()))
        bindings.append(binding)

    def run(i: int) -> Tensor:
        session.run_with_iobinding(bindings[i])
        return kept[0].view(rows, new, query_heads, dim).transpose(1, 2)

    return run


def channel_codes(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes of ``x``, ``[B, H, S, D]``, as the operator keeps them: int4 in pairs, counted from -8."""
    codes = (x / scale).round()
    if bits == 8:
        return codes.to(torch.int8)
    nibbles = (codes + 8).to(torch.uint8)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def group_query_attention(problem: Problem, bits: int) -> bytes:
    """A model of one node."""
    from onnx import TensorProto, helper

    info = helper.make_tensor_value_info
    (_, query_heads, _, dim), heads = problem.query.shape, problem.keys.shape[1]
    number = TensorProto.FLOAT16 if problem.kind == "float16" else TensorProto.FLOAT
    cache = {0: number, 8: TensorProto.INT8, 4: TensorProto.UINT8}[bits]
    held = ["B", heads, "S", dim // 2 if bits == 4 else dim]
    inputs = [
        info("query", number, ["B", "Q", query_heads * dim]),
        *(info(name, number, ["B", "Q", heads * dim]) for name in SIDES),
        *(info(f"past_{name}", cache, held) for name in SIDES),
        info("last", TensorProto.INT32, ["B"]),
        info("stored", TensorProto.INT32, []),
    ]
    names: list[str] = [x.name for x in inputs]
    attributes: dict[str, Any] = {"num_heads": query_heads, "kv_num_heads": heads}
    if bits:
        scales = [info(f"{name}_scale", TensorProto.FLOAT, [heads, 1, dim]) for name in SIDES]
        inputs += scales
        names += [*[""] * 5, *(x.name for x in scales)]  # no rotation, positions, bias or sinks
        attributes |= {
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
            "kv_cache_bit_width": bits,
        }
    outputs = [info("out", number, ["B", "Q", query_heads * dim])]
    outputs += [info(f"present_{name}", cache, held) for name in SIDES]
    node = helper.make_node(
        "GroupQueryAttention", names, [x.name for x in outputs], domain="com.microsoft", **attributes
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


# --- OpenVINO ---------------------------------------------------------------------------------------------

OPENVINO_KINDS = {
    "float32": ("f32", "f32"),
    "bfloat16": ("bf16", "bf16"),
    "float16": ("f16", "f32"),
    "int8 g64": ("u8", "bf16"),
    "int4 g64": ("u4", "bf16"),
}
"""Precision of the cache and of what is computed."""
OPENVINO_PAGE = 32
FILL = 512
"""Tokens stored at a time: each run of them as a sequence of its own, or filling would take the square."""


def openvino(problem: Problem) -> Run:
    """Paged attention on random pages; keys of codes have scales by channel and page, values by token."""
    import numpy as np
    import openvino as ov

    rows, query_heads, new, dim = problem.query.shape
    stored = problem.keys.shape[2]
    model = paged_attention(problem)
    num_pages = -(-stored // OPENVINO_PAGE)
    pages = np.random.default_rng(0).permutation(rows * num_pages).astype(np.int32).reshape(rows, -1)
    query = torch.zeros(rows, stored, query_heads * dim)  # of the tokens stored before, never mind
    query[:, stored - new :] = flat(problem.query)
    tokens = {"query": query, "key": flat(problem.keys), "value": flat(problem.values)}

    def begin(request: Any) -> None:
        for port in model.inputs:
            if port.any_name.endswith("_cache.0"):
                sizes = [axis.get_length() for axis in list(port.partial_shape)[1:]]
                memory = ov.Tensor(port.element_type, ov.Shape([pages.size, *sizes]))
                memory.data[...] = np.zeros((), memory.data.dtype)
                request.set_tensor(port.any_name, memory)

    def feed(request: Any, first: int, last: int, past: int, tables: Any) -> None:
        """Tokens ``[first, last)`` of each sequence come after ``past`` others in the pages of ``tables``."""
        for name, x in tokens.items():
            part = x[:, first:last]
            request.set_tensor(name, ov.Tensor(part.flatten(0, 1).contiguous().numpy()))
        integers = {
            "past_lens": np.full(rows, past),
            "subsequence_begins": np.arange(rows + 1) * (last - first),
            "block_indices": tables.flatten(),
            "block_indices_begins": np.arange(rows + 1) * tables.shape[1],
            "max_context_len": np.array(past + last - first),
        }
        for name, values in integers.items():
            request.set_tensor(name, ov.Tensor(values.astype(np.int32)))

    requests = [model.create_infer_request() for _ in range(problem.copies)]
    for request in requests:
        begin(request)
        for first in range(0, stored, FILL):
            last = min(first + FILL, stored)
            within = slice(first // OPENVINO_PAGE, -(-last // OPENVINO_PAGE))
            feed(request, first, last, 0, pages[:, within])
            request.infer()
        feed(request, stored - new, stored, stored - new, pages)

    def run(i: int) -> Tensor:
        requests[i].infer()
        out = torch.from_numpy(requests[i].get_output_tensor(0).data)
        return out.view(rows, new, query_heads, dim).transpose(1, 2)

    return run


def paged_attention(problem: Problem) -> Any:
    """A model of one node, compiled."""
    import numpy as np
    import openvino as ov
    import openvino.opset13 as op
    from openvino.op import _PagedAttentionExtension

    (_, query_heads, _, dim), heads = problem.query.shape, problem.keys.shape[1]
    floats, integers = ov.Type.f32, ov.Type.i32
    cache, compute = OPENVINO_KINDS[problem.kind]
    parameters = []

    def given(name: str, dtype: Any, *shape: int) -> Any:
        parameter = op.parameter(ov.PartialShape(list(shape)), dtype, name=name)
        parameter.output(0).set_names({name})
        parameters.append(parameter)
        return parameter

    def empty(dtype: Any, *shape: int) -> Any:
        return op.constant(np.zeros(shape, dtype))

    no_integers, no_floats, zero = (
        partial(empty, np.int32, 0),
        partial(empty, np.float32, 0),
        partial(empty, np.int32),
    )
    inputs = [
        given("query", floats, -1, query_heads * dim),
        *(given(side, floats, -1, heads * dim) for side in SIDES),
        *(given(f"{side}_cache.0", ov.Type.dynamic, -1, heads, -1, -1) for side in SIDES),
        given("past_lens", integers, -1),
        given("subsequence_begins", integers, -1),
        given("block_indices", integers, -1),
        given("block_indices_begins", integers, -1),
        op.constant(np.array(dim**-0.5, np.float32)),
        zero(), no_floats(),  # window, slopes
        given("max_context_len", integers),
        # No scores to keep, rotation, sparse attention, sinks, eviction, nor pictures.
        no_integers(), no_integers(), no_integers(), no_floats(), no_floats(), zero(), zero(),
        empty(np.float32, 0, 0, 0, 0), zero(), no_integers(), no_integers(), no_integers(), no_integers(),
        empty(np.uint8, 0), no_integers(),
    ]  # fmt: skip
    node = _PagedAttentionExtension([x.output(0) for x in inputs])
    for side in "kv":
        node.get_rt_info()[f"num_{side}_heads"], node.get_rt_info()[f"{side}_head_size"] = heads, dim
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "KV_CACHE_PRECISION": cache,
        "INFERENCE_PRECISION_HINT": compute,
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    return ov.Core().compile_model(ov.Model([op.result(node.output(0))], parameters), "CPU", settings)


# --- vLLM -------------------------------------------------------------------------------------------------

VLLM_PAGE = 128
"""Page size of vLLM's engine on a CPU."""


def vllm(problem: Problem) -> Run:
    """vLLM's kernel for CPUs on random pages. Its schedule is made once, as for all layers of a step."""
    from vllm import _custom_ops as kernels
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    torch.cpu._init_amx()  # asks for the tile registers, without which its kernel ends the process
    rows, query_heads, new, dim = problem.query.shape
    heads, stored = problem.keys.shape[1:3]
    isa = _get_attn_isa(problem.dtype, VLLM_PAGE, dim)
    num_pages = -(-stored // VLLM_PAGE)
    pages = torch.randperm(rows * num_pages).view(rows, -1)
    slots = (pages[:, :, None] * VLLM_PAGE + torch.arange(VLLM_PAGE)).view(rows, -1)[:, :stored].flatten()
    key, value, query = (
        x.transpose(1, 2).flatten(0, 1).to(problem.dtype).contiguous()
        for x in (problem.keys, problem.values, problem.query)
    )
    memories = []
    for _ in range(problem.copies):
        memory = torch.zeros(pages.numel(), heads, 2 * VLLM_PAGE, dim, dtype=problem.dtype)
        memories.append(memory.chunk(2, dim=2))
        kernels.cpu_attn_reshape_and_cache(key, value, *memories[-1], slots, isa)
    out = torch.empty_like(query)
    starts = torch.arange(rows + 1, dtype=torch.int32) * new
    lengths = torch.full((rows,), stored, dtype=torch.int32)
    schedule = kernels.cpu_attn_get_scheduler_metadata(
        rows, query_heads, heads, dim, lengths, problem.dtype, starts, True, -1, isa, True
    )
    table = pages.int()

    def run(i: int) -> Tensor:
        no_slopes, no_window, no_softcap, no_sinks = None, -1, 0.0, None
        kernels.cpu_attention_with_kv_cache(
            query, *memories[i], out, starts, lengths, dim**-0.5, True, no_slopes, no_window, table,
            no_softcap, schedule, no_sinks,
        )  # fmt: skip
        return out.view(rows, new, query_heads, dim).transpose(1, 2)

    return run
