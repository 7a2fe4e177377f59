"""Function bodies: each PMX operator in standard ONNX operators, for one choice of types and attributes.

New keys and values are stacked to ``[2, N, H, D]``. ``ScatterND`` writes them where an index says,
``GatherND`` reads everything stored from the updated cache, so stores come before loads. The index names the
axes of the cache up to the last of L and T, whatever their order; the others are whole rows.
"""

from typing import NamedTuple

import onnx
from onnx import TensorProto, helper

from kvloom.core.layouts import CacheLayout
from kvloom.integrations.onnx.attention import attend
from kvloom.integrations.onnx.body import FLOAT, INT64, Body
from kvloom.integrations.onnx.operators import ATTENTION, STATIC, Operator
from kvloom.integrations.onnx.quantization import dequantize, quantize

_SHORT = {
    TensorProto.FLOAT: "f32",
    TensorProto.FLOAT16: "f16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "i8",
    TensorProto.UINT8: "u8",
}


class Choice(NamedTuple):
    """What a body is made for. ``table_rank`` and ``mask_rank`` are 0 where there is no such input."""

    operator: Operator
    domain: str
    attributes: dict[str, int]
    dtype: int
    cache_dtype: int
    scale_dtype: int
    table_rank: int = 0
    mask_rank: int = 0

    @property
    def overload(self) -> str:
        """A name that differs from those of all other choices; the layer is left to the node."""
        words = [_SHORT[t] for t in (self.dtype, self.cache_dtype, self.scale_dtype) if t in _SHORT]
        numbers = [
            f"{name}{value}"
            for name, value in self.attributes.items()
            if name not in ("layer_idx", "num_layer")
        ]
        return "_".join([*words, *numbers, f"table{self.table_rank}", f"mask{self.mask_rank}"])

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs up to the last that is used."""
        unused = {"scale"} if not self.attributes["quant_bit"] else set()
        unused |= {"attn_mask"} if not self.mask_rank else set()
        last = max(i for i, name in enumerate(self.operator.inputs) if name not in unused)
        return self.operator.inputs[: last + 1]

    @property
    def layout(self) -> CacheLayout:
        """Axes of cache and scale."""
        return self.operator.layout(self.domain + self.operator.group, self.attributes["cache_layout"])


def make_function(choice: Choice, opset: int) -> onnx.FunctionProto:
    """The body of ``choice`` as a model-local function."""
    operator, a = choice.operator, choice.attributes
    b = Body()
    if operator is STATIC:
        _static(b, choice)
    else:
        _ragged(b, choice)
    outputs = [*operator.outputs, "cache_out", *(["scale_out"] if a["quant_bit"] else [])]
    return helper.make_function(
        choice.domain + operator.group,
        operator.name,
        choice.inputs,
        outputs,
        b.nodes,
        [helper.make_opsetid("", opset)],
        attribute_protos=[helper.make_attribute(name, value) for name, value in a.items()],
        overload=choice.overload,
    )


class _Place(NamedTuple):
    """Where tokens lie: ``[N]`` int64 for the letter T, or for B and S."""

    coordinates: dict[str, str]


def _static(b: Body, choice: Choice) -> None:
    batch, num_new = b.size("current_key", 0), b.size("current_key", 1)
    start = b.op("Reshape", "start_pos", b.ints(1))
    end = b.op("Add", start, num_new)

    def grid(first: str, count: str) -> _Place:
        rows = b.unsqueeze(b.count(batch), 1)
        columns = b.unsqueeze(b.op("Add", b.count(count), first), 0)
        shape = b.shape(batch, count)
        flat = b.op("Mul", batch, count)
        at = {"B": b.op("Expand", rows, shape), "S": b.op("Expand", columns, shape)}
        return _Place({axis: b.reshape(x, flat) for axis, x in at.items()})

    heads, dim = b.size("current_key", 2), b.size("current_key", 3)
    flat = [b.reshape(x, b.op("Mul", batch, num_new), heads, dim) for x in ("current_key", "current_value")]
    stored = _update(b, choice, flat, heads, grid(start, num_new), grid(b.ints(0), end))
    for side, name in enumerate(("key", "value")):
        x = _repeated(
            b, b.op("Gather", stored, b.whole(side), axis=0), choice.attributes["num_repeat"], heads
        )
        repeated = b.op("Mul", heads, b.ints(choice.attributes["num_repeat"]))
        b.reshape(x, batch, end, repeated, dim, into=name)


def _ragged(b: Body, choice: Choice) -> None:
    a = choice.attributes
    new_sequence, new_offset = _tokens(b, "seqstarts")
    new_position = b.op("Add", new_offset, b.op("Gather", "start_pos", new_sequence))
    sequence, position = _tokens(b, "kvstarts")
    heads = b.size("current_key", 1)
    place = _Place({"T": _slots(b, choice, new_sequence, new_position)})
    everything = _Place({"T": _slots(b, choice, sequence, position)})
    stored = _update(b, choice, ["current_key", "current_value"], heads, place, everything)
    key, value = (b.op("Gather", stored, b.whole(side), axis=0) for side in (0, 1))
    if choice.operator is not ATTENTION:
        for name, x in (("key", key), ("value", value)):
            b.op("Identity", _repeated(b, x, a["num_repeat"], heads), into=name)
        return
    new_kvlen = b.op("Sub", b.op("Gather", "kvstarts", b.op("Add", new_sequence, b.whole(1))),
                     b.op("Gather", "kvstarts", new_sequence))  # fmt: skip
    new_seqlen = b.op("Sub", b.op("Gather", "seqstarts", b.op("Add", new_sequence, b.whole(1))),
                      b.op("Gather", "seqstarts", new_sequence))  # fmt: skip
    query_position = b.op("Add", new_offset, b.op("Sub", new_kvlen, new_seqlen))
    queries, keys = (new_sequence, query_position), (sequence, position)
    out = attend(b, a, (b.cast("query", FLOAT), b.cast(key, FLOAT), b.cast(value, FLOAT)), queries, keys,
                 choice.mask_rank)  # fmt: skip
    b.cast(out, choice.dtype, into="attn_output")


def _tokens(b: Body, starts: str) -> tuple[str, str]:
    """Sequence and position in it of each token of a ragged batch, from the prefix sums of lengths."""
    token = b.count(b.op("Gather", starts, b.ints(-1), axis=0))
    ends = b.op("Slice", starts, b.ints(1), b.ints(2**62), b.ints(0))
    passed = b.op("LessOrEqual", b.unsqueeze(ends, 0), b.unsqueeze(token, 1))
    sequence = b.op("ReduceSum", b.cast(passed, INT64), b.ints(1), keepdims=0)
    return sequence, b.op("Sub", token, b.op("Gather", starts, sequence))


def _slots(b: Body, choice: Choice, sequence: str, position: str) -> str:
    a = choice.attributes
    if a["cache_mode"] == 0:
        return b.op("Add", b.op("Gather", "cachestarts", sequence), position)
    if choice.table_rank == 1:
        return b.op("Gather", "cachestarts", b.op("Add", b.op("Gather", "kvstarts", sequence), position))
    size = b.whole(a["page_size"])
    page = b.op("Div", position, size)
    entry = b.op("Concat", b.unsqueeze(sequence, 1), b.unsqueeze(page, 1), axis=1)
    return b.op("Add", b.op("GatherND", "cachestarts", entry), b.op("Sub", position, b.op("Mul", page, size)))


def _update(b: Body, choice: Choice, new: list[str], heads: str, place: _Place, everything: _Place) -> str:
    """Write ``new`` at ``place``, then read ``everything``: ``[2, M, H, D]`` in the dtype of the inputs."""
    a = choice.attributes
    bits, group = a["quant_bit"], a["quant_group"]
    x = b.op("Concat", *(b.unsqueeze(side, 0) for side in new), axis=0)
    axes = choice.layout.axes.split()
    indexed = axes[: max(i for i, axis in enumerate(axes) if axis in "LTBS") + 1]
    inner = [axis for axis in axes if axis in ("2", "H")]
    there = _index(b, indexed, place, heads)
    here = _index(b, indexed, everything, heads)
    # Updates have the tokens first, then whatever axes the layout has, in its order.
    order = [("2", "N", "H", "D").index(axis) for axis in ("N", *inner, "D")]
    back = [order.index(i) for i in range(4)]

    def scatter(cache: str, rows: str, into: str) -> str:
        return b.op("ScatterND", cache, there, b.op("Transpose", rows, perm=order), into=into)

    def gather(cache: str) -> str:
        return b.op("Transpose", b.op("GatherND", cache, here), perm=back)

    if not bits:
        same = choice.dtype == choice.cache_dtype
        x = x if same else b.cast(x, choice.cache_dtype)
        stored = gather(scatter("cache", x, "cache_out"))
        return stored if same else b.cast(stored, choice.dtype)
    codes, scales = quantize(b, x, choice.dtype, bits, group, choice.scale_dtype)
    codes = gather(scatter("cache", codes, "cache_out"))
    scales = gather(scatter("scale", scales, "scale_out"))
    return dequantize(b, codes, scales, choice.dtype, bits, group, choice.scale_dtype)


def _index(b: Body, indexed: list[str], place: _Place, heads: str) -> str:
    """``[N, (2), (H), axes]``: coordinates of the rows of all tokens, in the order of the layout."""
    inner = [axis for axis in indexed if axis in ("2", "H")]
    anyone = next(iter(place.coordinates.values()))
    extents = {"2": b.ints(2), "H": heads}
    shape = b.shape(b.size(anyone, 0), *(extents[axis] for axis in inner))
    rank = 1 + len(inner)
    parts = []
    for axis in indexed:
        if axis in place.coordinates:
            x, at = place.coordinates[axis], 0
        elif axis == "L":
            x, at = b.op("Reshape", b.attribute("layer_idx"), b.ints(1)), 0
        else:
            x, at = b.count(extents[axis]), 1 + inner.index(axis)
        others = [i for i in range(rank) if i != at]
        x = b.unsqueeze(x, *others) if others else x
        parts.append(b.unsqueeze(b.op("Expand", x, shape), rank))
    return b.op("Concat", *parts, axis=rank)


def _repeated(b: Body, x: str, num_repeat: int, heads: str) -> str:
    """``[M, H, D]`` with each head ``num_repeat`` times in a row."""
    if num_repeat == 1:
        return x
    wanted = b.count(b.op("Mul", heads, b.ints(num_repeat)))
    return b.op("Gather", x, b.op("Div", wanted, b.whole(num_repeat)), axis=1)
