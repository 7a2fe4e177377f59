"""A fingerprint differs if any of its fields does, and so does the name of whatever it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from store.runs import CODES, PLAIN, fingerprint

from kvloom.errors import ConfigError, UnsupportedError
from kvloom.store.digests import TextDigests, salt_digest
from kvloom.store.fingerprint import Fingerprint, LayerFormat, SideFormat, rotation_in

WHOSE = fingerprint(LayerFormat(2, CODES, CODES))
OTHERS: dict[str, Any] = {
    "config": "other",
    "weights": "other",
    "dtype": "float16",
    "rope": "other",
    "attention": "other",
    "rotation": "keys",
    "behavior": "other",
    "smoothing": "other",
    "context": "other",
    "recent": 64,
    "head_dim": 8,
    "bits": 4,
    "group": 4,
    "scale_dtype": "float32",
    "heads": 3,
}
"""Another value of each field. A field that is missing here fails the test until it has one."""


def changed(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one field changed, each of them."""
    for field in fields(value):
        name, old = field.name, getattr(value, field.name)
        if name in (
            "rotated",
            "full_range",
        ):  # follows from the fingerprint's own rotation; of 4 and 2 bits only
            continue
        if is_dataclass(old):
            for inner, new in changed(old, f"{path}{name}."):
                yield inner, replace(value, **{name: new})
        elif isinstance(old, tuple):
            yield f"{path}{name}: one less", replace(value, layers=old[:-1])
            for inner, new in changed(old[-1], f"{path}{name}."):
                yield inner, replace(value, layers=(*old[:-1], new))
        else:
            yield f"{path}{name}", replace(value, **{name: OTHERS[name]})


@pytest.mark.parametrize(
    ("name", "other"), list(changed(WHOSE)), ids=lambda x: x if isinstance(x, str) else ""
)
def test_each_field_changes_the_digest_and_every_name(name: str, other: Fingerprint) -> None:
    assert other != WHOSE
    assert other.digest != WHOSE.digest
    assert WHOSE.difference(other).startswith(name.split(".")[0].split(":")[0])
    mine, theirs = (TextDigests(x.digest, salt_digest(""), [1, 2]).digests([0, 1, 2]) for x in (WHOSE, other))
    assert set(mine).isdisjoint(theirs)


def test_every_field_is_changed_here() -> None:
    names = {x.name for kind in (Fingerprint, LayerFormat, SideFormat) for x in fields(kind)}
    assert names == OTHERS.keys() | {"layers", "key", "value", "rotated", "full_range"}


ROTATED = replace(CODES, rotated=True)


def test_layers_are_rotated_as_the_fingerprint_says() -> None:
    mine = fingerprint(LayerFormat(2, ROTATED, CODES), rotation="keys")
    theirs = fingerprint(LayerFormat(2, CODES, CODES), rotation="keys")
    assert mine.layers == theirs.layers == Fingerprint.from_json(mine.to_json()).layers
    assert mine.digest == theirs.digest
    assert "rotated" not in mine.to_json()
    assert rotation_in(mine.layers) == "keys"
    assert mine.layers[0].key.rotated


@pytest.mark.parametrize("rotation", ["none", "values", "both"])
def test_a_rotation_that_layers_do_not_have_is_refused(rotation: str) -> None:
    with pytest.raises(ConfigError, match=f"^rotation must be that of the layers, 'keys', got '{rotation}'$"):
        fingerprint(LayerFormat(2, ROTATED, CODES), rotation=rotation)


def test_layers_that_are_rotated_differently_have_no_fingerprint() -> None:
    layers = LayerFormat(2, PLAIN, ROTATED), LayerFormat(2, PLAIN, CODES)
    with pytest.raises(UnsupportedError, match=r"^values must be rotated in every layer or in none"):
        replace(WHOSE, layers=layers)


def test_a_full_range_is_said_and_a_symmetric_one_is_not() -> None:
    """So files that were written before there were ranges are of symmetric codes, and have their names."""
    symmetric, full = (
        fingerprint(LayerFormat(2, side, PLAIN)) for side in (FOUR, replace(FOUR, full_range=True))
    )
    assert "full_range" not in symmetric.to_json()
    assert full.to_json() == symmetric.to_json().replace(
        '"dtype":"bfloat16",', '"dtype":"bfloat16","full_range":true,'
    )
    assert full.digest != symmetric.digest
    for each in (symmetric, full):
        assert Fingerprint.from_json(each.to_json()).layers == each.layers
    assert symmetric.difference(full).startswith("layers is ")


@pytest.mark.parametrize("value", ["false", "1", "null"])
def test_a_range_that_no_file_has_is_refused(value: str) -> None:
    text = fingerprint(LayerFormat(2, replace(FOUR, full_range=True), PLAIN)).to_json()
    with pytest.raises(ConfigError):
        Fingerprint.from_json(text.replace('"full_range":true', f'"full_range":{value}'))


def test_an_entry_without_values_is_read_as_it_is_spelled() -> None:
    keys = replace(WHOSE, layers=(LayerFormat(1, CODES, None), LayerFormat(1, PLAIN, None)))
    assert Fingerprint.from_json(keys.to_json()).layers == keys.layers
    assert '"value":null' in keys.to_json()


@pytest.mark.parametrize("value", ["0", "{}", "[]", '""', "false"])
def test_values_that_are_none_are_null(value: str) -> None:
    text = replace(WHOSE, layers=(LayerFormat(1, CODES, None),)).to_json()
    with pytest.raises(ConfigError):
        Fingerprint.from_json(text.replace("null", value))


OF = {"head_dim": 64, "dtype": "bfloat16"}
FOUR = SideFormat(**OF, bits=4, group=32, scale_dtype="float16")  # type: ignore[arg-type]
TWO = SideFormat(**OF, bits=2, group=64, scale_dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rotation", "layers", "recent", "digest"),
    [
        ("none", [(8, SideFormat(64, "bfloat16"), SideFormat(64, "bfloat16"))] * 2, 0,
         "769ac9dfb2367f8a322e1f130c26143eb910ce12944c46ac60b78ccbb30f85c8"),
        ("keys", [(8, FOUR, TWO)] * 3, 64,
         "0fe1f391c6722b957c6473beb033d2721d778c544a28a1435bebf5556ed872fd"),
    ],
)  # fmt: skip
def test_digests_are_those_of_files_that_were_written(
    rotation: str, layers: list[Any], recent: int, digest: str
) -> None:
    of = tuple(LayerFormat(*layer) for layer in layers)
    whose = Fingerprint("c", "w", "bfloat16", "{}", "full", rotation, of, recent=recent)
    assert whose.digest.hex() == digest


def test_salts_and_lengths_have_names_of_their_own() -> None:
    names = [
        digest
        for salt in ("", "a", "b", "\ud800")
        for digest in TextDigests(WHOSE.digest, salt_digest(salt), [5, 5, 5]).digests(range(4))
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_it_is_read_as_it_is_spelled(num_layers: int) -> None:
    mixed = replace(WHOSE, layers=(LayerFormat(2, PLAIN, CODES),) * num_layers + WHOSE.layers)
    assert Fingerprint.from_json(mixed.to_json()) == mixed


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"layers":[]}', WHOSE.to_json() + " ", WHOSE.to_json().replace("2,", "true,")],
)
def test_another_spelling_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Fingerprint.from_json(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fingerprint(weights=""), "weights must be a text"),
        (lambda: fingerprint(rotation="hadamard"), "rotation must be one of"),
        (lambda: fingerprint(num_layers=0), "layers must hold at least one"),
        (lambda: SideFormat(0, "float32"), "head_dim must be a positive int, got 0"),
        (lambda: SideFormat(4, "int8"), "dtype must be one of"),
        (lambda: SideFormat(4, "float32", 3), "bits must be 0, 8, .*, got 3"),
        (lambda: SideFormat(4, "float32", 0, 2), "group must be 0 without codes"),
        (lambda: SideFormat(4, "float32", 8, 3, "float16"), "group must divide head_dim 4"),
        (lambda: SideFormat(4, "float32", 8, 2, "int8"), "scale_dtype must be one of"),
        (lambda: LayerFormat(0, PLAIN, PLAIN), "heads must be a positive int, got 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
