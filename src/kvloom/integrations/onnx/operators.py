"""The PMX operators by their documents: names, input order, attributes and ranges."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from kvloom.core.layouts import OPERATOR_LAYOUTS, CacheLayout

DOMAINS: Final = ("opmx", "pmx")
"""The later name of the domain, and the original one, which numbers the layouts of attention differently."""
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Attribute:
    """An integer attribute: ``default`` is ``None`` if it must be given; ``high`` is exclusive."""

    default: int | None
    low: int = 0
    high: int | None = None
    only: Collection[int] = ()

    def problem(self, value: object) -> str | None:
        """The problem of ``value``, as the end of a sentence."""
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, int):
            return f"must be an int, got {value!r}"
        if self.only:
            return None if value in self.only else f"must be one of {sorted(self.only)}, got {value}"
        if value < self.low or (self.high is not None and value >= self.high):
            bound = f"at least {self.low}" if self.high is None else f"in [{self.low}, {self.high})"
            return f"must be {bound}, got {value}"
        return None


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """One operator. The last of ``inputs``, those in ``optional``, may be missing or empty.

    Attributes:
        name: Name in the document, such as ``KeyValueCache``.
        group: Suffix of the domain, ``""`` or ``".dynamic_batching"``.
        inputs: Names of inputs in order.
        optional: Names of inputs that may be left out.
        outputs: Names of outputs in the order of the document.
        attributes: Attributes by name, in the order of the document.
    """

    name: str
    group: str
    inputs: tuple[str, ...]
    optional: frozenset[str]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    @property
    def all_outputs(self) -> tuple[str, ...]:
        """The outputs of the document, then the updated cache and scale of the functional form."""
        return (*self.outputs, "cache", "scale")

    def layout(self, domain: str, number: int) -> CacheLayout:
        """The layout that this operator calls ``number`` in ``domain``."""
        return CacheLayout.of(f"{domain}.{self.name}", number)

    def complete(self, given: Mapping[str, int]) -> dict[str, int]:
        """``given`` with defaults for missing attributes."""
        defaults = {name: a.default for name, a in self.attributes.items() if a.default is not None}
        return {**defaults, **{name: int(value) for name, value in given.items()}}

    def problems(self, given: Mapping[str, object]) -> list[str]:
        """The problems of the attributes ``given``, one sentence each."""
        found = [
            f"attribute must be one of {self.name}'s ({', '.join(self.attributes)}), got {name}"
            for name in given
            if name not in self.attributes
        ]
        for name, attribute in self.attributes.items():
            if name in given:
                problem = attribute.problem(given[name])
                found += [] if problem is None else [f"attribute {name} {problem}"]
            elif attribute.default is None:
                found.append(f"attribute {name} must be given, got none")
        if found:
            return found
        a = self.complete({name: int(value) for name, value in given.items() if isinstance(value, int)})
        if a["layer_idx"] >= a["num_layer"]:
            found.append(f"attribute layer_idx must be in [0, {a['num_layer']}), got {a['layer_idx']}")
        if a["quant_bit"] == 4 and a["quant_group"] % 2:
            found.append(f"attribute quant_group must be even where quant_bit is 4, got {a['quant_group']}")
        if "num_heads" in a and a["num_heads"] % (a["num_kv_heads"] or a["num_heads"]):
            found.append(
                f"attribute num_kv_heads must divide num_heads {a['num_heads']}, got {a['num_kv_heads']}"
            )
        return found


_CACHE: Final = {
    "num_layer": Attribute(1, low=1),
    "layer_idx": Attribute(0),
    "quant_bit": Attribute(0, only=(0, 4, 8)),
    "quant_group": Attribute(8, low=1),
}
_BATCH: Final = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
_FLAG: Final = (0, 1)


def _layouts(name: str) -> Attribute:
    return Attribute(0, high=len(OPERATOR_LAYOUTS[f"opmx.{name}"]))


STATIC: Final = OperatorSpec(
    "KeyValueCache",
    "",
    ("current_key", "current_value", "start_pos", "cache", "scale"),
    frozenset({"scale"}),
    ("key", "value"),
    {**_CACHE, "num_repeat": Attribute(1, low=1), "cache_layout": _layouts("KeyValueCache")},
)
DYNAMIC: Final = OperatorSpec(
    "KeyValueCache",
    ".dynamic_batching",
    ("current_key", "current_value", *_BATCH, "max_seqlen", "max_kvlen", "cache", "scale"),
    frozenset({"scale"}),
    ("key", "value"),
    {
        **_CACHE,
        "num_repeat": Attribute(1, low=1),
        "cache_mode": Attribute(0, only=_FLAG),
        "cache_layout": _layouts("dynamic_batching.KeyValueCache"),
        "page_size": Attribute(128, low=1),
    },
)
ATTENTION: Final = OperatorSpec(
    "MultiHeadCacheAttention",
    ".dynamic_batching",
    (
        "query",
        "current_key",
        "current_value",
        *_BATCH,
        "decoding_batches",
        "max_seqlen",
        "max_kvlen",
        "cache",
        "scale",
        "attn_mask",
    ),
    frozenset({"scale", "attn_mask"}),
    ("attn_output",),
    {
        "num_heads": Attribute(None, low=1),
        "head_dim": Attribute(None, low=1),
        "is_causal": Attribute(None, only=_FLAG),
        "is_alibi": Attribute(0, only=_FLAG),
        "num_kv_heads": Attribute(0),
        **_CACHE,
        "cache_mode": Attribute(0, only=_FLAG),
        "cache_layout": _layouts("dynamic_batching.MultiHeadCacheAttention"),
        "page_size": Attribute(128, low=1),
    },
)

OPERATORS: Final = {
    (domain + operator.group, operator.name): operator
    for domain in DOMAINS
    for operator in (STATIC, DYNAMIC, ATTENTION)
}
"""Operators by domain and type of their nodes."""
