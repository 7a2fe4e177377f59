"""Public operators: check, choose a backend, call. Slots are checked if that needs no synchronization."""

from typing import Any, Final

import torch
from torch import Tensor

from kvloom.core.checks import (
    INDEX_DTYPES,
    INT64_END,
    debugging,
    expect,
    expect_range,
)
from kvloom.core.indexing import check_distinct, expect_slots
from kvloom.core.memory import expect_disjoint, expect_writable
from kvloom.core.views import KVView, detached
from kvloom.errors import ArgumentError, ShapeError
from kvloom.ops import schemas
from kvloom.ops.attend_arguments import (
    OF_BIAS,
    attend_arguments,
    bias_arguments,
    expect_attend,
    latent_view,
)
from kvloom.ops.choice import run
from kvloom.ops.expect import (
    PARTS,
    apart_from,
    expect_dtype,
    expect_loadable,
    expect_store,
    expect_writable_view,
    loaded_bytes,
)
from kvloom.ops.fast import steps
from kvloom.ops.fast.plain import COMPILED, load_plain, plain_arguments, store_plain
from kvloom.ops.gathered import attention as gathered
from kvloom.ops.offsets import KeyOffset, expect_offset, load_with_offset
from kvloom.ops.scores import CAUSAL, Batch, Scores
from kvloom.ops.smoothing import KeySmoothing, expect_restored, in_rows, transform_arguments

_NO_BLOCKS: Final = (0, 0)


def store(
    key: Tensor,
    value: Tensor | None,
    slots: Tensor,
    kv: KVView,
    *,
    full_range: bool = False,
    smoothing: KeySmoothing | None = None,
    positions: Tensor | None = None,
    blocks: tuple[int, int] = _NO_BLOCKS,
    backend: str = "auto",
) -> None:
    """Write new keys and values to their slots, in place, quantized if ``kv`` is.

    Smoothing and rotation before have the bits of ``smoothing.smoothed`` and ``ops.rotate``. The compiled
    kernel applies them to a few tokens at a time, which stay in the processor's cache.

    Args:
        key: ``[T, H, Dk]`` or ``[B, H, N, Dk]``, any strides. float32, float16 or bfloat16 where the cache is
            quantized or of another float dtype (then it is cast); otherwise the dtype of the cache, of which
            the bits are copied.
        value: ``[T, H, Dv]`` or ``[B, H, N, Dv]``, dtype of ``key``; ``None`` in a cache of keys only.
        slots: ``[T]`` or ``[B, N]`` int64 or int32, distinct. A negative slot skips its token.
        kv: Cache to write. It must not overlap ``key`` or ``value``, which are stored without their gradient.
        full_range: Whether codes of 4 and 2 bits are in full range, see ``kvloom.quant.affine``, or symmetric
            as standards define 4 bits. Both are read in the same way.
        smoothing: Smoothing of keys, which must be of a float dtype, before they are stored; ``None`` for
            none.
        positions: Positions of the tokens in their texts, int64 or int32, shape of ``slots``; read if
            ``smoothing`` has an offset.
        blocks: Elements of keys and of values that are rotated together before they are stored, as of
            ``ops.rotate``; 0 for none.
        backend: ``"auto"`` (by device), ``"reference"``, ``"cpu"`` or ``"triton"``, which does not smooth or
            rotate.

    Raises:
        ShapeError: an argument does not fit; nothing was written.
        ArgumentError: a slot is outside the cache (CPU; on other devices the kernel stops),
            ``full_range`` is no bool, or ``blocks`` are no such numbers; nothing was written.
        UnsupportedError: the backend cannot run it.
    """
    if type(full_range) is not bool:
        raise ArgumentError(f"full_range must be a bool, got {full_range!r}")
    transform = _transform(smoothing, positions, blocks)
    given = key, value, slots, kv, full_range, transform
    is_on_gpu = backend == "auto" and kv.key.device.type in steps.DEVICES
    if steps.store_step(*given) if is_on_gpu else backend in COMPILED and store_plain(*given):
        return
    if smoothing is not None:
        smoothing.expect_keys(key, positions)
    if isinstance(key, Tensor) and isinstance(slots, Tensor) and (key.ndim, slots.ndim) == (4, 2):
        key, value, slots = _packed(key, value, slots)
        if smoothing is not None and smoothing.offset is not None and positions is not None:
            transform = _transform(smoothing, positions.flatten(), blocks)
    is_apart = expect_store(key, value, slots, kv)
    slots = apart_from(kv, slots)
    # Detached, or autograd would make the cache require a gradient and keep every step in memory.
    key, value = detached(key), None if value is None else detached(value)
    if not is_apart:  # interleaved with rows of the cache, sharing no byte, which kernels refuse
        key, value = key.clone(), None if value is None else value.clone()
    if transform:
        key = in_rows("key", key, blocks[0])
        value = None if value is None else in_rows("value", value, blocks[1])
    if debugging():
        check_distinct("slots", slots)
    name = "store.transformed" if transform else "store"
    run(backend, name, kv.device, key, value, slots, *kv.tensors, full_range, *transform)
    kv.mark_changed()
    if is_on_gpu:
        steps.keep_store(*given)


def _transform(
    smoothing: KeySmoothing | None,
    positions: Tensor | None,
    blocks: tuple[int, int],
    *,
    is_restored: bool = False,
) -> tuple[Any, ...]:
    """Arguments of the operators for smoothing and rotation, or their inverse; empty for none."""
    if smoothing is None and blocks is _NO_BLOCKS:
        return ()
    if not isinstance(smoothing, KeySmoothing | None):
        raise ArgumentError(f"smoothing must be a KeySmoothing or None, got {type(smoothing).__name__}")
    if not isinstance(blocks, tuple) or [type(x) for x in blocks] != [int, int]:
        raise ArgumentError(f"blocks must be two numbers of elements, got {blocks!r}")
    if smoothing is None and blocks == _NO_BLOCKS:
        return ()
    return transform_arguments(blocks, smoothing, positions, is_restored=is_restored)


def _packed(key: Tensor, value: Tensor | None, slots: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Convert ``[B, H, N, D]`` to ``[T, H, D]``, and slots ``[B, N]`` to ``[T]``."""
    expect("slots", slots, "B N", dtype=INDEX_DTYPES)
    rows, count = slots.shape
    sizes = expect("key", key, "B H N Dk", B=rows, N=count)
    if value is not None:
        expect("value", value, "B H N Dv", B=rows, H=sizes["H"], N=count)
        value = value.transpose(1, 2).flatten(0, 1)
    return key.transpose(1, 2).flatten(0, 1), value, slots.flatten()


def load(
    slots: Tensor,
    kv: KVView,
    *,
    dtype: torch.dtype | None = None,
    num_repeat: int = 1,
    offset: KeyOffset | None = None,
    smoothing: KeySmoothing | None = None,
    positions: Tensor | None = None,
    blocks: tuple[int, int] = _NO_BLOCKS,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Read keys and values from their slots, dequantized.

    With ``smoothing`` and ``blocks`` the transform of ``store`` is inverted, with the bits of
    ``smoothing.restored`` and ``ops.rotate`` of what was read in ``dtype``.

    Args:
        slots: ``[T]`` or ``[B, N]`` int64 or int32, in any order, repeats allowed.
        kv: Cache to read.
        dtype: Dtype of the result; ``None`` for that of the cache or, if it is quantized, of its scales.
        num_repeat: Number of times that each head is repeated in a row (for attention without grouped
            queries).
        offset: Offset that was subtracted from the keys before they were stored; it is added in float32,
            before they are rounded to ``dtype``.
        smoothing: Smoothing of the stored keys; ``None`` for none.
        positions: Position of each slot's token, int64 or int32, of the shape of ``slots``; with ``offset``,
            or with ``smoothing`` that has one.
        blocks: Elements of stored keys and of values that were rotated together; 0 for none.
        backend: ``"auto"`` (by device), ``"reference"``, ``"cpu"`` or ``"triton"``.

    Returns:
        ``(key, value)``, new tensors ``[T, H * num_repeat, D]``, or ``[B, H * num_repeat, N, D]`` as torch's
        attention takes them. A cache of keys only gives a value with D = 0.

    Raises:
        ShapeError, ArgumentError: as ``store``; a negative slot is an error here, and so is a transform with
            ``offset`` or ``num_repeat``.
    """
    transform = _transform(smoothing, positions, blocks, is_restored=True)
    is_plain = type(num_repeat) is int and num_repeat == 1 and offset is None
    if backend in COMPILED and is_plain and (positions is None or transform):
        if (loaded := load_plain(slots, kv, dtype, transform)) is not None:
            return loaded
    if isinstance(slots, Tensor) and slots.ndim == 2:
        expect("slots", slots, "B N", dtype=INDEX_DTYPES, device=kv.device)
        slots = slots.contiguous()
    else:
        expect_slots("slots", slots, None, kv.device)
    expect_range("num_repeat", num_repeat, 1, INT64_END)
    if dtype is None:
        dtype = kv.key.cache.dtype if kv.key.scale is None else kv.key.scale.dtype
    expect_dtype("dtype of the loaded key", dtype, kv.key)
    if kv.value is not None:
        expect_dtype("dtype of the loaded value", dtype, kv.value)
    if num_repeat > 1 and not torch.compiler.is_compiling():
        loaded_bytes(slots.numel(), kv, dtype, num_repeat)
    if transform:
        if offset is not None or num_repeat != 1:
            raise ArgumentError("offset and num_repeat must be left out with smoothing or blocks")
        expect_restored(slots, kv, dtype, smoothing, positions, blocks)
    given = None if transform else expect_offset(offset, positions, slots, kv)
    name, more = ("load.transformed", transform) if transform else ("load", (num_repeat,))
    try:
        if given is not None:
            return load_with_offset(slots, kv, dtype, num_repeat, *given, backend)
        key, value = run(backend, name, kv.device, slots, *kv.tensors, dtype, *more)
    except (RuntimeError, MemoryError, ShapeError):  # of arguments that do not fit
        expect_loadable(slots.numel(), kv, dtype, num_repeat)
        raise
    return key, value


def copy(
    source: KVView, source_slots: Tensor, target: KVView, target_slots: Tensor, *, backend: str = "auto"
) -> None:
    """Copy slots to slots, codes and scales unchanged; ``source`` and ``target`` may be one cache.

    All reads happen before all writes. The two may differ in layout, so this also converts one layout to
    another.

    Args:
        source: Cache to read.
        source_slots: ``[T]`` int64 or int32.
        target: Cache to write; dtypes, heads, head dims and groups of ``source``.
        target_slots: ``[T]``, distinct.
        backend: ``"auto"`` (by device), ``"reference"``, ``"cpu"`` or ``"triton"``.

    Raises:
        ShapeError, ArgumentError: as ``load``; nothing was written.
    """
    expect_slots("source_slots", source_slots, None, source.device)
    expect_slots("target_slots", target_slots, source_slots.shape[0], target.device)
    if source.device != target.device:
        raise ShapeError(f"target must be on {source.device} as source, got {target.device}")
    expect_writable_view("target", target)
    reads, writes = [], []
    for name, a, b in zip(PARTS, source.tensors, target.tensors, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise ArgumentError(f"target.{name} must be {'None' if a is None else 'given'} as in source")
        if a.dtype != b.dtype or a.shape[3] != b.shape[3] or a.shape[4:].numel() != b.shape[4:].numel():
            raise ShapeError(
                f"target.{name} must have {a.shape[3]} heads of {a.shape[4:].numel()} {a.dtype} as source, "
                f"got {b.shape[3]} of {b.shape[4:].numel()} {b.dtype}"
            )
        reads.append(a)
        writes.append(b)
    source_slots, target_slots = apart_from(target, source_slots), apart_from(target, target_slots)
    if debugging():
        check_distinct("target_slots", target_slots)
    run(backend, "copy", source.device, reads, source_slots, writes, target_slots)
    target.mark_changed()


def attend(
    query: Tensor,
    kv: KVView,
    batch: Batch,
    scores: Scores = CAUSAL,
    *,
    is_latent: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of new tokens over stored ones, reading the cache in place; the new ones are already stored.

    ``softmax(q.k) v`` in float32. Query head g uses key/value head ``g // (Hq / H)``. A row that sees no key
    (and has no sink) gives 0; a hidden value has no effect, not even NaN. One sequence's result depends only
    on its own data.

    On the CPU it is compiled for head dims up to 576. With AVX-512 (BF16, VNNI), float16 and bfloat16 queries
    are multiplied with codes in integers: a query vector as two int8 digits, 15 bits of its largest element,
    and the weights times the scales of the values as two more, 16 bits. Unquantized bfloat16 is multiplied by
    bfloat16 instructions, for which weights are rounded to bfloat16; so are codes whose groups are no
    multiple of 32, if head dims are a multiple of 64. All else is float32 of dequantized numbers, as in the
    reference. Sums are float32, in partial results of 512 stored tokens each, which are summed in float32,
    too.

    On CUDA, sequences of many new tokens whose numbers ``batch.counts`` has are computed by torch's attention
    over keys and values that are gathered for the call, if that has what ``scores`` ask for. Then a hidden
    value of a new token that is NaN makes rows before it NaN, and bits are torch's, which may depend on the
    batch.

    Args:
        query: ``[Tq, Hq, Dk]`` float32, float16 or bfloat16; Hq is a multiple of H.
        kv: Keys and values, dequantized to the dtype of ``query``.
        batch: Ragged lengths and slots.
        scores: Scale, masks and biases; causal by default.
        is_latent: Whether ``kv`` has latents as keys and rope keys as values, of one head, as multi-head
            latent attention (MLA) caches them. A key is then the latent followed by the rope key, and its
            value is the latent; ``query`` is ``[Tq, Hq, Dk + Dv]``, the result ``[Tq, Hq, Dk]``, and the
            default scale that of ``Dk + Dv``. Without values there are no rope keys.
        out: Tensor for the result, ``[Tq, Hq, Dv]``, contiguous, dtype of ``query``; new if ``None``. It
            shares no memory with other arguments, and gets no gradient.
        backend: ``"auto"`` (by device), ``"reference"``, ``"cpu"`` or ``"triton"``.

    Returns:
        ``out``, or ``[Tq, Hq, Dv]``, dtype of ``query``.

    Raises:
        ShapeError: an argument does not fit; ``out`` was not written.
        ArgumentError: a value is out of range, or ``query`` or ``out`` requires a gradient beside ``out``; it
            was not written.
        UnsupportedError: on ``backward``: there is no gradient.
    """
    if is_latent:
        kv, is_latent = latent_view(kv)
    may_gather = backend == "auto" and batch.counts is not None and kv.device.type in gathered.DEVICES
    is_step = batch.is_fixed and kv.key.device.type in steps.DEVICES and backend == "auto" and out is None
    if is_step and not may_gather and steps.is_step(query, scores):
        own = query, kv, batch, scores, is_latent
        if (step := steps.attend_step(*own, lambda: expect_attend(*own))) is not None:
            return step[0]
    is_compiled = backend in COMPILED and not may_gather
    plain = plain_arguments(query, kv, batch, scores, out) if is_compiled else None
    if plain is not None and is_latent and out is None and scores.positional_bias is None:
        try:
            found: Tensor = schemas.attend_latent(*plain)
            return found
        except (ValueError, IndexError, RuntimeError, ArithmeticError):
            pass  # the checks in Python have the better message
    elif plain is not None and not is_latent:
        operator, into = schemas.attend, schemas.attend_out
        if scores.positional_bias is not None:
            plain = (*plain, *bias_arguments(scores))
            operator, into = schemas.attend_biased, schemas.attend_biased_out
        try:
            if out is not None:
                into(*plain, out)
                return out
            attended: Tensor = operator(*plain)
            return attended
        except (ValueError, IndexError, RuntimeError, ArithmeticError):
            pass  # the checks in Python have the better message
    sizes = expect_attend(query, kv, batch, scores, is_latent)
    bias = bias_arguments(scores)
    overload = "attend.latent" if is_latent else "attend.biased" if bias else "attend"
    arguments = (*attend_arguments(query, kv, batch, scores, query.shape[2]), *bias)
    call: tuple[Any, ...] = run, backend, overload, kv.device, *arguments
    if may_gather and gathered.is_gathered(query, kv, batch, scores, is_latent):
        call = gathered.attend_plain, query, kv, batch, scores
    if out is None:
        result: Tensor = schemas.without_gradient("attend", *call)
        return result
    expect("out", out, "Tq Hq Dv", dtype=(query.dtype,), device=kv.device,
           **{name: sizes[name] for name in ("Tq", "Hq", "Dv")})  # fmt: skip
    if not out.is_contiguous():
        raise ShapeError(f"out must be contiguous, got strides {out.stride()}")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ArgumentError("query must not require a gradient where out is given: what is written has none")
    expect_writable("out", out)
    for name, x in (("query", query), *zip(PARTS, kv.tensors, strict=True), ("mask", scores.mask),
                    ("alibi_slopes", scores.alibi_slopes), ("sinks", scores.sinks),
                    *zip(OF_BIAS, bias, strict=False)):  # fmt: skip
        if x is not None:
            expect_disjoint("out", out, name, x)
    return out.copy_(call[0](*call[1:]))
