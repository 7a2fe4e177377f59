"""Attention as others compute it on the CPU: measured where a peer is installed and its answer is ours."""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from llama_peer import GGML_TYPES, llama
from problem import KINDS, TOLERANCE, Problem, Run, difference
from rounds import all_cores
from runtime_peers import OPENVINO_KINDS, onnxruntime, openvino, vllm
from torch.nn.functional import scaled_dot_product_attention


def torch_by_rows(problem: Problem) -> Run:
    """Scaled dot product attention, query heads in place of new tokens so that no key is read twice."""
    query, memories = problem.query.to(problem.dtype), problem.memories(problem.dtype)
    rows = heads_as_rows(query, problem)
    return lambda i: scaled_dot_product_attention(rows, *memories[i]).view(query.shape)


def torch_gqa(problem: Problem) -> Run:
    """Scaled dot product attention as torch documents it for grouped heads."""
    query, memories = problem.query.to(problem.dtype), problem.memories(problem.dtype)
    causal = query.shape[2] > 1
    return lambda i: scaled_dot_product_attention(query, *memories[i], is_causal=causal, enable_gqa=True)


def zentorch(problem: Problem) -> Run:
    """AMD's scaled dot product attention, query heads in place of new tokens."""
    attend = torch.ops.zentorch.zentorch_sdpa.default
    query, memories = problem.query.to(problem.dtype), problem.memories(problem.dtype)
    rows = heads_as_rows(query, problem)
    return lambda i: attend(rows, *memories[i])[0].view(query.shape)


def heads_as_rows(query: torch.Tensor, problem: Problem) -> torch.Tensor:
    """``[B, H, Hq / H, D]`` of one new token: the query heads of a key/value head as rows."""
    batch, heads, _, dim = problem.keys.shape
    return query.view(batch, heads, -1, dim)


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's attention.

    Attributes:
        name: As the tables show it.
        modules: What must be installed.
        make: From a problem to a call.
        kinds: Of cache that it has; where torch and zentorch have none of codes, they hold the query's dtype.
        of_one_token: Whether it takes one new token only.
    """

    name: str
    modules: tuple[str, ...]
    make: Callable[[Problem], Run]
    kinds: tuple[str, ...] = tuple(KINDS)
    of_one_token: bool = False


PEERS = (
    Peer("torch", ("torch",), torch_by_rows, of_one_token=True),
    Peer("torch, enable_gqa", ("torch",), torch_gqa),
    Peer("zentorch", ("zentorch",), zentorch, of_one_token=True),
    Peer(
        "ONNX Runtime",
        ("onnxruntime", "onnx"),
        onnxruntime,
        ("float32", "float16", "int8 g64", "int4 g64"),
    ),
    Peer("OpenVINO", ("openvino",), openvino, tuple(OPENVINO_KINDS)),
    Peer("llama.cpp", ("llama_cpp",), llama, tuple(GGML_TYPES)),
)
VLLM = Peer("vLLM", ("vllm",), vllm, ("float32", "bfloat16", "float16"))
"""In an environment of its own: it pins what the others need newer."""


def why_not(modules: Iterable[str]) -> str | None:
    """Why one of the modules cannot be used, or ``None``."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            return "not installed" if error.name == module else first_line(error)
        except ImportError as error:
            return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def prepare(
    problem: Problem, expected: torch.Tensor, peers: Iterable[Peer] = PEERS
) -> tuple[dict[str, Run], dict[str, str]]:
    """Calls by peer, and why others cannot be measured. ``expected`` is our answer.

    A kind or a number of new tokens that a peer does not have is no reason: it is left out without one.
    """
    found: dict[str, Run] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        if problem.kind not in peer.kinds or (peer.of_one_token and problem.query.shape[2] > 1):
            continue
        if (reason := why_not(peer.modules)) is not None:
            missing[peer.name] = reason
            continue
        try:
            with all_cores():
                run = peer.make(problem)
        except (AttributeError, ImportError, RuntimeError) as error:  # of another version than it is for
            missing[f"{peer.name}, {problem.kind}"] = f"does not run: {first_line(error)}"
            continue
        off = max(difference(run(i), expected) for i in range(problem.copies))
        if off <= TOLERANCE[problem.kind]:
            found[peer.name] = run
        else:
            missing[f"{peer.name}, {problem.kind}"] = (
                f"differs by {off:.2g}, {TOLERANCE[problem.kind]} allowed"
            )
    return found, missing
