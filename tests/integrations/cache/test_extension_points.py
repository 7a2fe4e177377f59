"""The installed transformers has all that kvloom enters, and what is gone is said in a sentence."""

from __future__ import annotations

from contracts.test_hosts import script

points = script("extension_points")
CACHE = "transformers.cache_utils.Cache"


def test_the_installed_version_has_every_point() -> None:
    lines, gone = points.report([*points.POINTS, *points.imports()], points.transformers.__version__)
    assert gone == []
    assert len(lines) > 40  # before 5.19 there are no sessions, and 42 points


def test_files_of_points_are_there_and_name_them() -> None:
    for point in points.POINTS:
        source = (points.SOURCES / point.file).read_text(encoding="utf-8")
        members = [name.partition("(")[0].replace(":", ".").rpartition(".")[2] for name in point.names]
        assert any(member in source for member in members), point


def test_what_is_gone_is_a_sentence() -> None:
    asked = [
        points.Point((f"{CACHE}.no_such_method",), "a.py"),
        points.Point((f"{CACHE}.update(key_states, no_such_argument)",), "b.py"),
        points.Point(("transformers.PretrainedConfig:no_such_attribute",), "c.py"),
        points.Point(("transformers.no_such_module.Cache",), "d.py", since="9"),
    ]
    lines, gone = points.report(asked, "8.0")
    assert lines == [] and gone == [
        f"transformers 8.0: {reason}, which src/kvloom/{file} needs, or what replaced it"
        for reason, file in (
            (f"there is no {CACHE}.no_such_method", "a.py"),
            (f"{CACHE}.update takes no no_such_argument", "b.py"),
            ("a transformers.PretrainedConfig has no no_such_attribute", "c.py"),
        )
    ]
    (late,) = points.report(asked[3:], "9.0")[1]
    assert late.startswith("transformers 9.0: there is no transformers.no_such_module, which src/kvloom/d.py")


def test_a_point_that_was_renamed_has_what_it_was_before() -> None:
    point = points.Point((f"{CACHE}.newest", f"{CACHE}.update", f"{CACHE}.oldest"), "a.py")
    assert points.report([point], "8.0") == ([f"{CACHE}.update (a.py, before: {CACHE}.oldest)"], [])
