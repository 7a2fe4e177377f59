"""Function bodies: each PMX operator in standard ONNX operators, one function for each variant.

New keys and values are stacked to ``[2, N, H, D]``. ``ScatterND`` writes them at the places of an index, and
``GatherND`` reads all stored tokens from the updated cache, so stores come before loads. The index has the
axes of the cache up to the last of L and T, in any order; the axes after them are written in whole rows.
"""

from typing import NamedTuple

import onnx
from onnx import TensorProto, helper

from kvloom.core.layouts import CacheLayout
from kvloom.integrations.onnx.attention import append_attention
from kvloom.integrations.onnx.builder import FLOAT, INT64, Builder, Operand
from kvloom.integrations.onnx.operators import ATTENTION, STATIC, OperatorSpec
from kvloom.integrations.onnx.quantization import dequantize, quantize

_SHORT = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "i8",
    TensorProto.UINT8: "u8",
}


class Variant(NamedTuple):
    """Everything that a body depends on. ``scale_dtype`` and the ranks are 0 without such an input."""

    operator: OperatorSpec
    domain: str
    attributes: dict[str, int]
    dtype: int
    cache_dtype: int
    scale_dtype: int
    table_rank: int = 0
    mask_rank: int = 0

    @property
    def overload(self) -> str:
        """Unique name of the variant, without the layer, so that all layers share one body."""
        words = [_SHORT[t] for t in (self.dtype, self.cache_dtype, self.scale_dtype) if t in _SHORT]
        numbers = [
            f"{name}{value}"
            for name, value in self.attributes.items()
            if name not in ("layer_idx", "num_layer")
        ]
        return "_".join([*words, *numbers, f"table{self.table_rank}", f"mask{self.mask_rank}"])

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs of the operator up to the last one that this variant reads."""
        unused = {"scale"} if not self.attributes["quant_bit"] else set()
        unused |= {"attn_mask"} if not self.mask_rank else set()
        last = max(i for i, name in enumerate(self.operator.inputs) if name not in unused)
        return self.operator.inputs[: last + 1]

    @property
    def layout(self) -> CacheLayout:
        """Axes of cache and scale."""
        return self.operator.layout(self.domain + self.operator.group, self.attributes["cache_layout"])


def make_function(variant: Variant, opset: int) -> onnx.FunctionProto:
    """The body of ``variant`` as a model-local function."""
    operator, a = variant.operator, variant.attributes
    b = Builder()
    if operator is STATIC:
        _static(b, variant)
    else:
        _ragged(b, variant)
    outputs = [*operator.outputs, "cache_out", *(["scale_out"] if a["quant_bit"] else [])]
    return helper.make_function(
        variant.domain + operator.group,
        operator.name,
        variant.inputs,
        outputs,
        b.nodes,
        [helper.make_opsetid("", opset)],
        attribute_protos=[helper.make_attribute(name, value) for name, value in a.items()],
        overload=variant.overload,
    )


class _Positions(NamedTuple):
    """Coordinates of stored tokens: ``[N]`` int64 for axis T, or for axes B and S."""

    coordinates: dict[str, str]


def _static(b: Builder, variant: Variant) -> None:
    batch, num_new = b.size("current_key", 0), b.size("current_key", 1)
    start = b.Reshape("start_pos", [1])
    end = b.Add(start, num_new)

    def grid(first: Operand, count: str) -> _Positions:
        rows = b.unsqueeze(b.arange(batch), 1)
        columns = b.unsqueeze(b.Add(b.arange(count), first), 0)
        shape = b.shape(batch, count)
        flat = b.Mul(batch, count)
        axes = {"B": b.Expand(rows, shape), "S": b.Expand(columns, shape)}
        return _Positions({axis: b.reshape(x, flat) for axis, x in axes.items()})

    heads, dim = b.size("current_key", 2), b.size("current_key", 3)
    flat = [b.reshape(x, b.Mul(batch, num_new), heads, dim) for x in ("current_key", "current_value")]
    stored = _update(b, variant, flat, heads, grid(start, num_new), grid([0], end))
    for side, name in enumerate(("key", "value")):
        x = _repeated(b, b.Gather(stored, side, axis=0), variant.attributes["num_repeat"], heads)
        repeated = b.Mul(heads, [variant.attributes["num_repeat"]])
        b.reshape(x, batch, end, repeated, dim, into=name)


def _ragged(b: Builder, variant: Variant) -> None:
    a = variant.attributes
    new_sequence, new_offset = _tokens(b, "seqstarts")
    new_position = b.Add(new_offset, b.Gather("start_pos", new_sequence))
    sequence, position = _tokens(b, "kvstarts")
    heads = b.size("current_key", 1)
    new_at = _Positions({"T": _slots(b, variant, new_sequence, new_position)})
    all_at = _Positions({"T": _slots(b, variant, sequence, position)})
    stored = _update(b, variant, ["current_key", "current_value"], heads, new_at, all_at)
    key, value = (b.Gather(stored, side, axis=0) for side in (0, 1))
    if variant.operator is not ATTENTION:
        for name, x in (("key", key), ("value", value)):
            b.Identity(_repeated(b, x, a["num_repeat"], heads), into=name)
        return
    after = b.Add(new_sequence, 1)
    new_kvlen, new_seqlen = (
        b.Sub(b.Gather(starts, after), b.Gather(starts, new_sequence)) for starts in ("kvstarts", "seqstarts")
    )
    query_position = b.Add(new_offset, b.Sub(new_kvlen, new_seqlen))
    queries, keys = (new_sequence, query_position), (sequence, position)
    triple = b.cast("query", FLOAT), b.cast(key, FLOAT), b.cast(value, FLOAT)
    out = append_attention(b, a, triple, queries, keys, variant.mask_rank)
    b.cast(out, variant.dtype, into="attn_output")


def _tokens(b: Builder, starts: str) -> tuple[str, str]:
    """Sequence and position in it of each token of a ragged batch, from the prefix sums of lengths."""
    token = b.arange(b.Gather(starts, [-1], axis=0))
    ends = b.Slice(starts, [1], [2**62], [0])
    ended = b.LessOrEqual(b.unsqueeze(ends, 0), b.unsqueeze(token, 1))
    sequence = b.ReduceSum(b.cast(ended, INT64), [1], keepdims=0)
    return sequence, b.Sub(token, b.Gather(starts, sequence))


def _slots(b: Builder, variant: Variant, sequence: str, position: str) -> str:
    a = variant.attributes
    if a["cache_mode"] == 0:
        return b.Add(b.Gather("cachestarts", sequence), position)
    if variant.table_rank == 1:
        return b.Gather("cachestarts", b.Add(b.Gather("kvstarts", sequence), position))
    size = a["page_size"]
    page = b.Div(position, size)
    entry = b.Concat(b.unsqueeze(sequence, 1), b.unsqueeze(page, 1), axis=1)
    return b.Add(b.GatherND("cachestarts", entry), b.Sub(position, b.Mul(page, size)))


def _update(
    b: Builder, variant: Variant, new: list[str], heads: str, new_at: _Positions, all_at: _Positions
) -> str:
    """Write ``new`` at ``new_at``, then read ``[2, M, H, D]`` at ``all_at`` in the dtype of the inputs."""
    a = variant.attributes
    bits, group = a["quant_bit"], a["quant_group"]
    x = b.Concat(*(b.unsqueeze(side, 0) for side in new), axis=0)
    axes = variant.layout.axes.split()
    indexed = axes[: max(i for i, axis in enumerate(axes) if axis in "LTBS") + 1]
    inner = [axis for axis in axes if axis in ("2", "H")]
    write_index = _index(b, indexed, new_at, heads)
    read_index = _index(b, indexed, all_at, heads)
    # Updates have the tokens first, then the axes of the layout, in its order.
    order = [("2", "N", "H", "D").index(axis) for axis in ("N", *inner, "D")]
    back = [order.index(i) for i in range(4)]

    def scatter(cache: str, rows: str, into: str) -> str:
        return b.ScatterND(cache, write_index, b.Transpose(rows, perm=order), into=into)

    def gather(cache: str) -> str:
        return b.Transpose(b.GatherND(cache, read_index), perm=back)

    if not bits:
        same = variant.dtype == variant.cache_dtype
        x = x if same else b.cast(x, variant.cache_dtype)
        stored = gather(scatter("cache", x, "cache_out"))
        return stored if same else b.cast(stored, variant.dtype)
    codes, scales = quantize(b, x, variant.dtype, bits, group, variant.scale_dtype)
    codes = gather(scatter("cache", codes, "cache_out"))
    scales = gather(scatter("scale", scales, "scale_out"))
    return dequantize(b, codes, scales, variant.dtype, bits, group, variant.scale_dtype)


def _index(b: Builder, indexed: list[str], at: _Positions, heads: str) -> str:
    """``[N, (2), (H), axes]`` int64: coordinates of the rows of all tokens, in the order of the layout."""
    inner = [axis for axis in indexed if axis in ("2", "H")]
    tokens = next(iter(at.coordinates.values()))
    extents: dict[str, Operand] = {"2": [2], "H": heads}
    shape = b.shape(b.size(tokens, 0), *(extents[axis] for axis in inner))
    rank = 1 + len(inner)
    parts = []
    for axis in indexed:
        if axis in at.coordinates:
            x, dim = at.coordinates[axis], 0
        elif axis == "L":
            x, dim = b.Reshape(b.attribute("layer_idx"), [1]), 0
        else:
            x, dim = b.arange(extents[axis]), 1 + inner.index(axis)
        others = [i for i in range(rank) if i != dim]
        x = b.unsqueeze(x, *others) if others else x
        parts.append(b.unsqueeze(b.Expand(x, shape), rank))
    return b.Concat(*parts, axis=rank)


def _repeated(b: Builder, x: str, num_repeat: int, heads: str) -> str:
    """``[M, H, D]`` with each head repeated ``num_repeat`` times in a row."""
    if num_repeat == 1:
        return x
    repeated = b.arange(b.Mul(heads, [num_repeat]))
    return b.Gather(x, b.Div(repeated, num_repeat), axis=1)
