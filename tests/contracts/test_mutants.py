"""Every bug in tests/mutants can still be planted, and names tests that exist; ``make mutants`` runs them."""

from pathlib import Path

import pytest
from mutants.kernels import Kernels
from mutants.run import ROOT, Mutant, PatchError, patches

from kvloom.ops.impl.cpu import ISAS

PATCH = """A file says less than it should.
Tests: tests/paging

--- a/some.py
+++ b/some.py
@@ -7,2 +7,2 @@
 first
-second
+2nd
"""


@pytest.mark.parametrize("path", patches(), ids=lambda path: path.stem)
def test_bug_can_be_planted_and_names_its_tests(path: Path) -> None:
    mutant = Mutant.read(path)
    for source, text in mutant.sources(ROOT).items():
        assert text != source.read_text(encoding="utf-8")
        if source.suffix == ".py":
            assert source.is_relative_to(ROOT / "src" / "kvloom")
            compile(text, source, "exec")
        else:
            assert source.is_relative_to(ROOT / "csrc")
            assert mutant.isa in ISAS
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:
            assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_bug_is_gone_afterwards(tmp_path: Path) -> None:
    patch, source = tmp_path / "a-bug.patch", tmp_path / "some.py"
    patch.write_text(PATCH)
    source.write_text("zeroth\nfirst\nsecond\n")
    with Mutant.read(patch).planted(tmp_path):
        assert source.read_text() == "zeroth\nfirst\n2nd\n"
    assert source.read_text() == "zeroth\nfirst\nsecond\n"


@pytest.mark.parametrize("text", ["first\n", "first\nsecond\nfirst\nsecond\n", "not first\nsecond\n"])
def test_lines_must_be_there_once(tmp_path: Path, text: str) -> None:
    patch, source = tmp_path / "a-bug.patch", tmp_path / "some.py"
    patch.write_text(PATCH)
    source.write_text(text)
    with pytest.raises(PatchError, match=r"some\.py must have these lines once:\nfirst\nsecond"):
        Mutant.read(patch).sources(tmp_path)


def test_a_bug_in_csrc_has_an_instruction_set_and_no_other_has(tmp_path: Path) -> None:
    patch = tmp_path / "a-bug.patch"
    in_csrc = PATCH.replace("some.py", "csrc/some.h")
    named = "Tests: tests/paging\nISA: avx512\n"
    for text, isa in (
        (PATCH, None),
        (in_csrc, "baseline"),
        (in_csrc.replace("Tests: tests/paging\n", named), "avx512"),
    ):
        patch.write_text(text)
        assert Mutant.read(patch).isa == isa
    patch.write_text(PATCH.replace("Tests: tests/paging\n", named))
    with pytest.raises(PatchError, match=r"a-bug\.patch must change csrc"):
        Mutant.read(patch)


def test_only_what_a_bug_changes_is_compiled_again(tmp_path: Path) -> None:
    root, build, copy = tmp_path / "root", tmp_path / "build", tmp_path / "copy"
    names = ("attend", "isa_avx512", "isa_baseline")
    commands = [f"c++ -o d/{x}.cpp.o -c {root}/csrc/{x}.cpp" for x in names]
    link = f"c++ -shared -o libx.so {' '.join(f'd/{x}.cpp.o' for x in names)} torch.so"
    deps = f"d/attend.cpp.o: #deps 2\n    {root}/csrc/attend.cpp\n    {root}/csrc/a.h\n\n" + "".join(
        f"d/{x}.cpp.o: #deps 2\n    {root}/csrc/{x}.cpp\n    {root}/csrc/kernels/../k.h\n\n"
        for x in names[1:]
    )
    kernels = Kernels.read(root, build, "\n".join([*commands, link]), deps)
    assert kernels.library == build / "libx.so"
    assert kernels.commands(copy, {root / "csrc/k.h"}, "avx512") == [
        f"c++ -o {copy}/isa_avx512.o -c {copy}/csrc/isa_avx512.cpp",
        f"c++ -shared -o {copy}/libx.so d/attend.cpp.o {copy}/isa_avx512.o d/isa_baseline.cpp.o torch.so",
    ]
    assert [x.stem for x in kernels.changed_units({root / "csrc/a.h"}, "baseline")] == ["attend"]


@pytest.mark.parametrize("start", ["A file says less than it should.", "Tests: tests/paging"])
def test_patch_must_say_what_and_where(tmp_path: Path, start: str) -> None:
    patch = tmp_path / "a-bug.patch"
    patch.write_text("".join(line for line in PATCH.splitlines(keepends=True) if not line.startswith(start)))
    with pytest.raises(PatchError, match=r"a-bug\.patch must begin with a sentence, a line 'Tests: \.\.\.'"):
        Mutant.read(patch)
