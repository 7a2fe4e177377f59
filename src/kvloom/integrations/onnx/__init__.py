"""PMX operators in ONNX. The only folder that imports onnx and onnxruntime."""

from kvloom.integrations.onnx.cache_views import group_query_cache, row_batch, standard_cache, write_slots
from kvloom.integrations.onnx.checks import check, problems
from kvloom.integrations.onnx.decoder import DecoderStep
from kvloom.integrations.onnx.export import export
from kvloom.integrations.onnx.nodes import (
    dynamic_key_value_cache,
    key_value_cache,
    multi_head_cache_attention,
    opset_imports,
)
from kvloom.integrations.onnx.portable import portable
from kvloom.integrations.onnx.session import REFERENCE_OPERATORS, Session, run

__all__ = [
    "REFERENCE_OPERATORS",
    "DecoderStep",
    "Session",
    "check",
    "dynamic_key_value_cache",
    "export",
    "group_query_cache",
    "key_value_cache",
    "multi_head_cache_attention",
    "opset_imports",
    "portable",
    "problems",
    "row_batch",
    "run",
    "standard_cache",
    "write_slots",
]
