"""How keys and values are kept, as a text: what it means, and what is no such text."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from core.spellings import BAD, ODD

from kvloom.core.entries import OF_BITS, SideFormat
from kvloom.core.specs import KVSpec, QuantSpec
from kvloom.core.spelling import STORAGE, Kind, parse_kind, recent_of
from kvloom.errors import ArgumentError, ConfigError


@pytest.mark.parametrize(
    ("text", "kind", "group"),
    [
        ("auto", "auto", None),
        ("float32", "float32", None),
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
        ("int8", "int8", None),
        ("int4", "int4", None),
        ("int8:g1", "int8", 1),
        ("int8:g7", "int8", 7),
        ("int8:g32", "int8", 32),
        ("int4:g16", "int4", 16),
        ("int4:g128", "int4", 128),
        ("int2", "int2", None),
        ("int2:g4", "int2", 4),
    ],
)
def test_kind_and_group_of_a_text(text: str, kind: str, group: int | None) -> None:
    rotate, range = ("keys", "full") if kind in ("int4", "int2") else ("none", "")
    assert parse_kind("kv", text) == Kind(kind, group, rotate, range=range)


@pytest.mark.parametrize(
    ("keys", "values", "recent"),
    [
        ("auto", "auto", 0),
        ("int8", "int8", 0),
        ("int4", "int4", 64),
        ("int4:g16,rotate=none", "int4:g16,rotate=none", 64),
        ("int8", "int4", 64),
        ("int4", "auto", 64),
        ("int4,recent=0", "int4,recent=0", 0),
        ("int8,recent=0", "int4", 0),
        ("int4,recent=8", "int4", 8),
        ("int8", "int8,recent=8", 8),
    ],
)
def test_recent_tokens_of_keys_and_values(keys: str, values: str, recent: int) -> None:
    assert recent_of(parse_kind("kv", keys), parse_kind("values", values)) == recent


def test_a_kind_alone_is_a_text() -> None:
    assert [parse_kind("kv", kind).name for kind in STORAGE] == list(STORAGE)


@pytest.mark.parametrize("text", [*BAD, None], ids=lambda text: repr(text)[:20])
def test_what_is_no_such_text_is_refused(text: object) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_kind("kv", text)
    assert str(error.value) == (
        "kv must be one of auto, float32, float16, bfloat16, int8, int4 or int2, codes also with a group "
        f"such as int8:g32 or an option such as int4,rotate=keys, got {text!r}"
    )


@pytest.mark.parametrize("text", [*BAD, None, "auto", "float32", "float16"], ids=lambda text: repr(text)[:20])
def test_what_spells_no_codes_is_refused(text: object) -> None:
    with pytest.raises(ArgumentError) as error:
        QuantSpec.parse(text)  # type: ignore[arg-type]
    assert str(error.value) == (
        "text must be one of int8, int4 or int2, codes also with a group such as int8:g32 or an option such "
        f"as int4,rotate=keys, got {text!r}"
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("int8,rotate=none", Kind("int8")),
        ("int4:g32,rotate=none", Kind("int4", 32, range="full")),
        ("int4,rotate=keys", Kind("int4", None, "keys", range="full")),
        ("int4,range=full", Kind("int4", None, "keys", range="full")),
        ("int4,range=symmetric", Kind("int4", None, "keys", range="symmetric")),
        ("int8:g8,rotate=values", Kind("int8", 8, "values")),
        ("int4:g16,rotate=both", Kind("int4", 16, "both", range="full")),
    ],
)
def test_options_stand_behind_the_group(text: str, kind: Kind) -> None:
    assert parse_kind("kv", text) == kind


@pytest.mark.parametrize(
    "text", ["int4,color=red", "int4,rotate=none,rotate=none", "int4:g32,Rotate=none", "int4,none=rotate"]
)
def test_an_option_that_is_unknown_or_there_twice_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^kv must .*, got '" + text):
        parse_kind("kv", text)


def test_a_value_that_an_option_does_not_have_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^kv must have as rotate one of .*, got 'int4,rotate=all'$"):
        parse_kind("kv", "int4,rotate=all")


@pytest.mark.parametrize("text", ["int8,range=full", "int8:g32,range=symmetric"])
def test_codes_without_a_choice_of_ranges_have_no_such_option(text: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^kv must have no range for {text[3]} bits, got '{text}'$"):
        parse_kind("kv", text)


@pytest.mark.parametrize(
    "text",
    ["float16,rotate=none", "auto,rotate=none", "int4,", "int4,rotate", "int4,rotate=", ",rotate=none"],
)
def test_options_are_of_codes_and_have_a_value(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"^kv must be one of .*, got '" + text):
        parse_kind("kv", text)


@pytest.mark.parametrize("text", ODD)
def test_a_group_that_is_no_whole_bytes_is_refused(text: str) -> None:
    bits = int(text[3])
    reason = f"must have a group of a multiple of {8 // bits} for {bits} bits, got '{text}'$"
    with pytest.raises(ArgumentError, match=f"^kv {reason}"):
        parse_kind("kv", text)
    with pytest.raises(ArgumentError, match=f"^values {reason}"):
        QuantSpec.parse(text, "values")


@pytest.mark.parametrize(
    ("bits", "group"), [*itertools.product((8, 4), (2, 8, 16, 30, 64, 10**12)), (2, 4), (2, 64)]
)
def test_a_text_is_read_as_it_is_spelled(bits: int, group: int) -> None:
    spec = QuantSpec(bits, group)
    options = {8: "", 4: ",rotate=none,range=symmetric", 2: ",rotate=none,range=symmetric"}[bits]
    assert str(spec) == f"int{bits}:g{group}{options}"
    assert QuantSpec.parse(str(spec)) == spec
    assert str(QuantSpec(bits, group, torch.bfloat16)) == str(spec)  # the dtype of scales is not spelled


@pytest.mark.parametrize(
    ("rotate", "keys", "values"),
    [("none", False, False), ("keys", True, False), ("values", False, True), ("both", True, True)],
)
def test_a_side_is_rotated_where_the_text_says_so(rotate: str, keys: bool, values: bool) -> None:
    text = f"int4:g32,rotate={rotate}"
    assert QuantSpec.parse(text, side="keys") == QuantSpec(4, 32, rotated=keys, full_range=True)
    assert QuantSpec.parse(text, side="values") == QuantSpec(4, 32, rotated=values, full_range=True)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("full_range", [True, False])
def test_rotated_codes_are_read_as_they_are_spelled(side: str, full_range: bool) -> None:
    spec = QuantSpec(4, 32, rotated=True, full_range=full_range)
    assert QuantSpec.parse(str(spec), side=side) == spec


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_scales_that_are_not_said_are_float16(bits: int) -> None:
    spec = QuantSpec(bits, None, torch.float16, full_range=bits < 8)
    assert QuantSpec.parse(f"int{bits}", side="values") == spec
    assert QuantSpec(bits).scale_dtype == torch.float16


@pytest.mark.parametrize(
    ("head_dim", "group"),
    [(8, 8), (32, 32), (40, 8), (64, 64), (72, 8), (80, 16), (96, 32), (112, 16), (128, 64), (192, 64)],
)
@pytest.mark.parametrize("bits", OF_BITS)
def test_a_group_that_is_not_said_divides_the_head_dim(bits: int, head_dim: int, group: int) -> None:
    assert KVSpec(1, 2, head_dim, quant=QuantSpec(bits)).quant == QuantSpec(bits, group)
    assert KVSpec(1, 2, head_dim, quant=QuantSpec(bits, 8)).quant == QuantSpec(bits, 8)


@pytest.mark.parametrize("head_dim", [4, 20, 36, 100])
def test_a_head_dim_that_is_no_multiple_of_8_needs_a_group(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"^head_dim must be a multiple of 8 .*, got {head_dim}$"):
        QuantSpec(8).for_head_dim(head_dim)
    assert QuantSpec(8, 4).for_head_dim(head_dim).group == 4


@pytest.mark.parametrize(
    "text",
    [
        *STORAGE,
        "int8:g32",
        "int4:g16,rotate=both",
        "int8,recent=32",
        "int4,rotate=none,recent=0",
        "int4:g8,range=symmetric,recent=0,smooth=none",
    ],
)
def test_a_kind_is_spelled_as_it_is_read(text: str) -> None:
    kind = parse_kind("kv", text)
    assert (str(kind), parse_kind("kv", str(kind))) == (text, kind)


@pytest.mark.parametrize("bits", [4, 2])
def test_codes_are_in_full_range_where_a_text_makes_them_and_says_nothing_else(bits: int) -> None:
    assert QuantSpec.parse(f"int{bits}").full_range
    assert QuantSpec.parse(f"int{bits},range=full") == QuantSpec.parse(f"int{bits}")
    assert not QuantSpec.parse(f"int{bits},range=symmetric").full_range
    assert not QuantSpec(bits).full_range


@pytest.mark.parametrize(("bits", "value"), [(8, True), (2, 1), (4, 1), (4, "full"), (4, None)])
def test_a_range_that_codes_do_not_have_is_refused(bits: int, value: object) -> None:
    with pytest.raises(ConfigError, match=r"^full_range must be "):
        QuantSpec(bits, full_range=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^full_range must be "):
        SideFormat(64, "float32", bits, 32, "float16", full_range=value)  # type: ignore[arg-type]


def test_what_earlier_releases_pickled_is_symmetric() -> None:
    state = QuantSpec(4, 32, torch.bfloat16, rotated=True).__getstate__()[:4]
    spec = QuantSpec.__new__(QuantSpec)
    spec.__setstate__(state)
    assert spec == QuantSpec(4, 32, torch.bfloat16, rotated=True, full_range=False)
    full = QuantSpec(4, 32, full_range=True)
    assert pickle.loads(pickle.dumps(full)) == copy.deepcopy(full) == full  # noqa: S301 (our own)


def test_keys_of_4_bits_are_rotated_unless_the_text_says_otherwise() -> None:
    assert QuantSpec.parse("int4").rotated
    assert not QuantSpec.parse("int4", side="values").rotated
    assert not QuantSpec.parse("int4,rotate=none").rotated
    assert not QuantSpec.parse("int8").rotated
