"""Every bug in tests/mutants can still be planted, and names tests that exist; ``make mutants`` runs them."""

from pathlib import Path

import pytest
from mutants.run import ROOT, Mutant, PatchError, patches

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
        assert source.is_relative_to(ROOT / "src" / "kvloom")
        assert text != source.read_text(encoding="utf-8")
        compile(text, source, "exec")
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


@pytest.mark.parametrize("start", ["A file says less than it should.", "Tests: tests/paging"])
def test_patch_must_say_what_and_where(tmp_path: Path, start: str) -> None:
    patch = tmp_path / "a-bug.patch"
    patch.write_text("".join(line for line in PATCH.splitlines(keepends=True) if not line.startswith(start)))
    with pytest.raises(PatchError, match=r"a-bug\.patch must begin with a sentence, a line 'Tests: \.\.\.'"):
        Mutant.read(patch)
