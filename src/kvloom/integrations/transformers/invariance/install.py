"""Changes of a model's layers for as long as a holder needs them: ``enable``, a pool or a session.

Layers are batch invariant or packed while at least one holder wishes it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kvloom.core.spelling import expect_pack
from kvloom.errors import ArgumentError, UnsupportedError
from kvloom.integrations.transformers.invariance.layers import (
    LINEAR,
    Invariant,
    InvariantRows,
    computes_attention,
    invariant_class,
    matrix_of,
)
from kvloom.integrations.transformers.invariance.packed_only import (
    PACKED_ONLY,
    PackedOnly,
    keep_packed_only,
    unpack,
)
from kvloom.integrations.transformers.invariance.packing import (
    PACKED,
    PackedRows,
    PackedWeight,
    most_packed_bytes,
    why_not_packable,
)
from kvloom.integrations.transformers.invariance.rules import NONE, rule_of
from kvloom.integrations.transformers.models.text_config import EXPAND, text_config_of, why_cuts_matter
from kvloom.ops.invariance import WHY_NOT_COMPILED, BatchInvariance, why_not_batch_invariant

CHANGES: Final = "_kvloom_layers"
"""Attribute of a model whose layers are changed."""
_RECURRENT: Final = ("A_log", "recurrent_param", "slope_rate")
"""Names of parameters and buffers that only layers with recurrent states have."""
BY_CUTS: Final = "recurrent states depend on how a text is cut"
"""Reason for which layers with recurrent states are not batch invariant by themselves."""


class Wish(NamedTuple):
    """Changes of a model's layers that a holder needs.

    Attributes:
        batch_invariant: Whether a row has the same bits among any other rows.
        pack: A value of ``PACKS``.
        attention: Whether attention uses ``BatchInvariance``, which may take more time.
    """

    batch_invariant: bool
    pack: bool | str
    attention: bool = False


NO_WISH: Final = Wish(False, False)


def expect_wish(model: Any, batch_invariant: bool | None, pack: bool | str, is_free: bool = False) -> Wish:
    """The wish for these arguments of a public function.

    Args:
        model: A model.
        batch_invariant: True, False, or ``None`` for wherever it takes no more time: in bfloat16, and packed.
        pack: A value of ``PACKS``.
        is_free: Whether batch invariance takes no more time in any dtype.

    Raises:
        ArgumentError: an argument has another value.
        UnsupportedError: one is wished, and the model is not on the CPU.
    """
    if not (batch_invariant is None or isinstance(batch_invariant, bool)):
        raise ArgumentError(f"batch_invariant must be True, False or None, got {batch_invariant!r}")
    expect_pack(pack)
    is_on_cpu = model.device.type == "cpu"
    for name, value in (("batch_invariant", batch_invariant), ("pack", pack)):
        if value and not is_on_cpu:
            raise UnsupportedError(f"{name} must be left out but on a CPU, got a model on {model.device}")
    if batch_invariant is None:
        return Wish(is_on_cpu and (is_free or bool(pack) or model.dtype == torch.bfloat16), pack)
    return Wish(batch_invariant, pack, attention=batch_invariant)


@dataclass
class LayerReport:
    """Report on the layers of a model that are batch invariant and packed, and on those that are not.

    Attributes:
        batch_invariant: Whether a holder wishes batch invariance.
        rules: Numbers of linear layers by their padding rule, as text.
        packed: Number of packed layers.
        packed_bytes: Bytes of their packed weights.
        not_packed: Names of linear layers that could not be packed, by the reason.
        not_invariant: Names of layers whose rows may differ, by the reason.
    """

    batch_invariant: bool = False
    rules: dict[str, int] = field(default_factory=dict)
    packed: int = 0
    packed_bytes: int = 0
    not_packed: dict[str, list[str]] = field(default_factory=dict)
    not_invariant: dict[str, list[str]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether all layers are batch invariant."""
        return self.batch_invariant and not self.not_invariant

    def summary(self) -> dict[str, Any]:
        """The report for JSON, with counts instead of names; ``batch_invariant`` is ``holds``."""
        return {
            "batch_invariant": self.holds,
            "rules": dict(self.rules),
            "packed": self.packed,
            "packed_bytes": self.packed_bytes,
            "not_packed": _counts(self.not_packed),
            "not_invariant": _counts(self.not_invariant),
        }


def _counts(names: dict[str, list[str]]) -> dict[str, int]:
    return {reason: len(of) for reason, of in names.items()}


def hold_layers(model: nn.Module, holder: str, wish: Wish) -> None:
    """Change the layers of a model for a holder, in addition to the wishes of other holders.

    Args:
        model: The model.
        holder: Name of the holder, whose earlier wish is replaced.
        wish: Wish of the holder.

    If an error is raised, such as a MemoryError, the layers are as before.
    """
    changes = getattr(model, CHANGES, None)
    if changes is None:
        if not any(wish):
            return
        changes = _Changes(model)
        setattr(model, CHANGES, changes)
    before = changes.wishes.get(holder)
    changes.wishes[holder] = wish
    try:
        changes.apply(model)
    except BaseException:
        if before is None:
            release_layers(model, holder)
        else:
            changes.wishes[holder] = before
            changes.apply(model)
        raise


def release_layers(model: nn.Module, holder: str) -> None:
    """Undo ``hold_layers`` for a holder; without holders the layers are as before."""
    changes = getattr(model, CHANGES, None)
    if changes is None or changes.wishes.pop(holder, None) is None:
        return
    changes.apply(model)
    if not changes.wishes:
        changes.hook.remove()
        delattr(model, CHANGES)


def report_layers(model: Any) -> LayerReport:
    """Report on the changes of a model's layers.

    Args:
        model: A ``PreTrainedModel`` that was given to ``enable``, a pool or a session.
    """
    changes = getattr(model, CHANGES, None)
    if changes is None:
        return LayerReport()
    report: LayerReport = replace(changes.report, not_invariant=dict(changes.report.not_invariant))
    for reason in _why_attention_varies(model, changes):
        report.not_invariant[reason] = ["attention"]
    # A session's thread may change layers at the same time.
    weights = [getattr(x, "packed", None) for x in model.modules() if isinstance(x, PackedRows)]
    packed = [x for x in weights if x is not None and x.tensor is not None]
    report.packed, report.packed_bytes = len(packed), sum(x.nbytes for x in packed)
    return report


def varies_in_attention(model: Any) -> bool:
    """Whether the layers of a model are batch invariant while its attention is not.

    What such a model computes is no continuation, to the bit, of what it computes with both, nor the reverse.
    """
    changes = vars(model).get(CHANGES)
    return changes is not None and any(_why_attention_varies(model, changes))


def _why_attention_varies(model: Any, changes: "_Changes") -> Iterator[str]:
    """Reasons why attention is not batch invariant among layers that are."""
    if not changes.report.batch_invariant:
        return
    config = text_config_of(model)
    attention = config._attn_implementation
    if not str(attention).startswith("kvloom"):
        yield f"attention is {attention!r}, not 'kvloom'"
    elif changes.attention is None and (why_not := why_not_batch_invariant(model.dtype)) is not None:
        yield f"{why_not}, unless batch_invariant=True"
    if WHY_NOT_COMPILED is not None:
        yield "attention runs in plain torch, without compiled kernels"
    if why := why_cuts_matter(config):
        yield why


class _Changes:
    """Changes of a model. It has no reference to a module, so copies of the model can share it.

    Attributes:
        wishes: Wish of each holder.
        report: Report on the changes.
        hook: Handle of the hook that checks the layers before each forward.
        conditions: Result of ``conditions_of`` for which rules were found.
        attention: Batch invariance of attention while a holder wishes it, else ``None``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.wishes: dict[str, Wish] = {}
        self.report = LayerReport()
        self.hook = model.register_forward_pre_hook(_BeforeForward(self))
        self.conditions: tuple[Any, ...] = ()
        self.attention: BatchInvariance | None = None

    def apply(self, model: nn.Module) -> None:
        """Change the layers to the union of the present wishes."""
        packs = {str(wish.pack): wish.pack for wish in self.wishes.values()}
        wish = Wish(
            any(wish.batch_invariant for wish in self.wishes.values()),
            packs.get("True") or packs.get("only") or False,
            any(wish.attention for wish in self.wishes.values()),
        )
        if wish.attention and self.attention is None:
            self.attention = BatchInvariance()
        elif not wish.attention and self.attention is not None:
            self.attention.close()
            self.attention = None
        report = LayerReport(batch_invariant=wish.batch_invariant)
        self.conditions = conditions_of(model)
        reasons = why_not_separate(model)
        if wish.pack == "only":
            reasons = {**_read_by_attention(model), **reasons}
        for name, layer in model.named_modules():
            if kind_of(layer) in LINEAR:
                why_not = reasons.get(name, "")
                if not isinstance(layer, PackedOnly):
                    why_not = why_not or why_not_packable(matrix_of(layer))
                change_linear(layer, wish if not why_not else Wish(wish.batch_invariant, False))
                if wish.pack and why_not:
                    report.not_packed.setdefault(why_not, []).append(name)
            else:
                change_other(layer, wish)
            if wish.batch_invariant:
                _note(report, name, layer)
        self.report = report
        _PACKED_LAYERS.pop(model, None)


def _note(report: LayerReport, name: str, layer: nn.Module) -> None:
    """Add a layer to the report: count its rule, or name why its rows may differ."""
    reason = ""
    if any(x in _RECURRENT for x in (*layer._parameters, *layer._buffers)):
        reason = BY_CUTS
    if isinstance(layer, InvariantRows):
        rule = layer.packed.rule if isinstance(layer, PackedRows) else layer.row_rule
        report.rules[str(rule)] = report.rules.get(str(rule), 0) + 1
    elif isinstance(layer, nn.Linear) and not isinstance(layer, Invariant):
        reason = f"{type(layer).__name__} is no linear layer of torch"
    if hasattr(layer, "layer_idx") and computes_attention(type(layer)):
        reason = "attention is not called through transformers' interface"
    if "forward" in vars(layer) and (isinstance(layer, Invariant) or kind_of(layer) in LINEAR):
        reason = "its forward was replaced"
    if reason:
        report.not_invariant.setdefault(reason, []).append(name)


class _BeforeForward:
    """Forward pre-hook that updates rules after a change of threads, and packed weights after a write."""

    def __init__(self, changes: _Changes) -> None:
        self._changes = changes

    def __call__(self, model: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if conditions_of(model) != self._changes.conditions:
            self._changes.apply(model)
        layers = _PACKED_LAYERS.get(model)
        if layers is None:
            packed = [x for x in model.modules() if isinstance(x, PackedRows)]
            layers = _PACKED_LAYERS[model] = [x for x in packed if not isinstance(x, PackedOnly)]
        for layer in layers:
            if not layer.packed.is_sampled_of(layer._parameters["weight"]):
                layer.packed.update(layer)


_PACKED_LAYERS: Final[WeakKeyDictionary[nn.Module, list[Any]]] = WeakKeyDictionary()
"""Packed layers of each model whose weights are checked before each forward; cleared by ``apply``."""


def why_not_separate(model: nn.Module) -> dict[str, str]:
    """Reasons why linear layers share their weights and are not packed, by name of the layer."""
    parameters = (p for module in model.modules() for p in module._parameters.values() if p is not None)
    owners = Counter(map(id, parameters))
    adapted = {id(x) for module in model.modules() if hasattr(module, "base_layer") for x in module.modules()}
    reasons = {}
    for name, layer in model.named_modules():
        if kind_of(layer) in LINEAR and id(layer) in adapted:
            reasons[name] = "adapted"
        elif kind_of(layer) in LINEAR and owners[id(layer._parameters.get("weight"))] > 1:
            reasons[name] = "tied"
    return reasons


def _read_by_attention(model: nn.Module) -> dict[str, str]:
    """Reasons for linear layers of MLA whose weights attention reads in the usual order, by name."""
    owners = (name for name, module in model.named_modules() if hasattr(type(module), EXPAND))
    return dict.fromkeys((f"{name}.kv_b_proj" for name in owners), "attention reads the weight")


def packable_bytes(model: nn.Module) -> int:
    """Upper bound of the bytes of a model's packed weights, if its dtype can be packed; needs no data."""
    reasons = why_not_separate(model)
    layers = [x for name, x in model.named_modules() if kind_of(x) in LINEAR and name not in reasons]
    return sum(most_packed_bytes(matrix_of(layer)) for layer in layers)


def conditions_of(model: Any) -> tuple[Any, ...]:
    """Number of threads and dtype, on which rules depend beside the shapes of layers."""
    return torch.get_num_threads(), next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def kind_of(layer: nn.Module) -> type[nn.Module]:
    """The original class of a layer."""
    return layer.original if isinstance(layer, Invariant) else type(layer)


def change_other(layer: nn.Module, wish: Wish) -> None:
    """Make a module that is no linear layer batch invariant, or restore it."""
    kind = kind_of(layer)
    wanted = invariant_class(kind) if wish.batch_invariant else None
    if type(layer) is not (wanted or kind):
        layer.__class__ = wanted or kind


def change_linear(layer: Any, wish: Wish) -> None:
    """Make a linear layer batch invariant or packed as wished, or restore it."""
    kind, batch_invariant, pack = kind_of(layer), wish.batch_invariant, wish.pack
    packed: dict[Any, Any] = PACKED_ONLY if pack == "only" else PACKED
    wanted: Any = packed[kind] if pack else None
    is_kept = wanted is not None and type(layer) is wanted
    if not is_kept:
        if isinstance(layer, PackedOnly):
            unpack(layer)
        for name in ("packed", "row_rule"):
            vars(layer).pop(name, None)
        layer.__class__ = kind
        if not (batch_invariant or pack):
            return
    changed, prepare = LINEAR[kind]
    matrix = matrix_of(layer)
    layer.row_rule = rule_of(matrix, layer.bias, prepare) if batch_invariant else NONE
    if is_kept:
        layer.packed.is_invariant = batch_invariant
        layer.packed.find_rule(matrix, layer.bias)
    elif pack == "only":
        keep_packed_only(layer, wanted, batch_invariant)
    elif pack:
        layer.packed = PackedWeight(layer, batch_invariant)
        layer.__class__ = wanted
    else:
        layer.__class__ = changed
