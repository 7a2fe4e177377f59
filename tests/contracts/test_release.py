"""What a release is checked for: names, sizes, tags, metadata, and that wheels are of the same sources."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from contracts.test_hosts import script

RELEASE = script("release")
X86 = "manylinux_2_27_x86_64.manylinux_2_28_x86_64"
ARM = "manylinux_2_27_aarch64"
FILES = {"kvloom_conform": "3.0.0", "kvloom_model": "1.0.0"}


def write_wheel(
    folder: Path, name: str, version: str, platform: str, says: str | None = None, **changed: bytes
) -> Path:
    """A wheel of a few files; ``says`` is the version in its metadata, ``changed`` files by their names."""
    folder.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    tags = "".join(f"Tag: py3-none-{tag}\n" for tag in platform.split("."))
    files = {f"{name}/__init__.py": b"", f"{about}/WHEEL": f"Wheel-Version: 1.0\n{tags}".encode()}
    metadata = f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {says or version}\n"
    files[f"{about}/METADATA"] = metadata.encode()
    if platform != "any":
        files[RELEASE.LIBRARY] = platform.encode()
    path = folder / f"{name}-{version}-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**files, **changed}.items():
            archive.writestr(file, content)
    return path


def write_sdist(folder: Path, name: str, version: str, files: tuple[str, ...]) -> None:
    with tarfile.open(folder / f"{name}-{version}.tar.gz", "w:gz") as archive:
        for file in files:
            archive.addfile(tarfile.TarInfo(f"{name}-{version}/{file}"), io.BytesIO())


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    for name, version in FILES.items():
        write_wheel(tmp_path, name, version, "any")
    write_wheel(tmp_path, "kvloom", "0.2.0", X86)
    write_wheel(tmp_path / "aarch64", "kvloom", "0.2.0", ARM)
    for name, version in {**FILES, "kvloom": "0.2.0"}.items():
        write_sdist(tmp_path, name, version, ("PKG-INFO", "pyproject.toml", "LICENSE"))
    return tmp_path


def test_a_whole_release_is_uploaded_what_extras_ask_for_first(dist: Path) -> None:
    names = [path.name for path in RELEASE.check(dist, "0.2.0", FILES)]
    assert names == [
        "kvloom_conform-3.0.0-py3-none-any.whl",
        "kvloom_conform-3.0.0.tar.gz",
        "kvloom_model-1.0.0-py3-none-any.whl",
        "kvloom_model-1.0.0.tar.gz",
        f"kvloom-0.2.0-py3-none-{X86}.whl",
        f"kvloom-0.2.0-py3-none-{ARM}.whl",
        "kvloom-0.2.0.tar.gz",
    ]


def replace(platform: str, **wheel: bytes) -> Callable[[Path], None]:
    """Another wheel for x86-64 in the place of the first."""

    def change(dist: Path) -> None:
        next(dist.glob("kvloom-*.whl")).unlink()
        write_wheel(dist, "kvloom", "0.2.0", platform, **wheel)

    return change


WRONG = {
    "a newer platform": (
        replace("manylinux_2_34_x86_64"),
        "must be kvloom-0.2.0-py3-none for manylinux_2_28_x86_64 or older",
    ),
    "another processor": (replace(ARM), "for manylinux_2_28_x86_64 or older"),
    "too large": (replace(X86, **{"kvloom/x": bytes(3_000_000)}), "at most 3,000,000 bytes, got 3,00"),
    "another version": (replace(X86, says="0.1.0"), "must say its name, got kvloom 0.1.0"),
    "other tags": (
        replace(X86, **{"kvloom-0.2.0.dist-info/WHEEL": b"Tag: py3-none-any\n"}),
        r"tags in .* must be those of its name, got \['py3-none-any'\]",
    ),
    "tests": (replace(X86, **{"tests/test_a.py": b""}), "files of kvloom only, got tests/test_a.py"),
    "other sources": (replace(X86, **{"kvloom/__init__.py": b"1"}), "one is of other sources"),
    "no wheel for Arm": (
        lambda dist: next(dist.glob("aarch64/*")).unlink(),
        r"must have one wheel of kvloom, got \[\]",
    ),
    "two wheels": (lambda dist: write_wheel(dist, "kvloom", "0.1.0", X86), "must have one wheel of kvloom"),
    "no sdist": (lambda dist: (dist / "kvloom-0.2.0.tar.gz").unlink(), "must have kvloom-0.2.0.tar.gz"),
    "no license": (
        lambda dist: write_sdist(dist, "kvloom", "0.2.0", ("PKG-INFO", "pyproject.toml")),
        "must have kvloom-0.2.0/LICENSE, got none",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_release_is_refused(what: str, dist: Path) -> None:
    change, message = WRONG[what]
    change(dist)
    with pytest.raises(RELEASE.ReleaseError, match=message):
        RELEASE.check(dist, "0.2.0", FILES)


def test_a_wheel_without_the_library_is_refused(dist: Path) -> None:
    path = next(dist.glob("kvloom-*.whl"))
    with zipfile.ZipFile(path) as archive:
        files = {x: archive.read(x) for x in archive.namelist() if x != RELEASE.LIBRARY}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(RELEASE.ReleaseError, match="libkvloom_cpu"):
        RELEASE.check(dist, "0.2.0", FILES)


BEFORE = "# Changelog\n\n## Unreleased\n\n{news}## 0.1.0 (2026-01-02)\n\n* First.\n"
AFTER = "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-03-04)\n\n{news}## 0.1.0 (2026-01-02)\n\n* First.\n"


def test_what_is_written_becomes_the_section() -> None:
    news = "* Faster.\n  Much.\n\n"
    made = RELEASE.with_section(BEFORE.format(news=news), "0.2.0", "2026-03-04", ["a: b"])
    assert made == AFTER.format(news=news)
    assert RELEASE.with_section(made, "0.2.0", "2026-05-06", ["a: b"]) == made


def test_where_nothing_is_written_commits_are_listed() -> None:
    made = RELEASE.with_section(BEFORE.format(news=""), "0.2.0", "2026-03-04", ["a: b", "c: d"])
    assert made == AFTER.format(news="* a: b\n* c: d\n\n")


def test_the_first_release_has_nothing_below_it() -> None:
    made = RELEASE.with_section("## Unreleased\n\n* All.\n", "0.1.0", "2026-03-04", [])
    assert made == "## Unreleased\n\n## 0.1.0 (2026-03-04)\n\n* All.\n"


@pytest.mark.parametrize(
    ("changelog", "message"),
    [(BEFORE.format(news=""), "something new"), ("# Changelog\n", "must have a section '## Unreleased'")],
)
def test_a_release_of_nothing_is_refused(changelog: str, message: str) -> None:
    with pytest.raises(RELEASE.ReleaseError, match=message):
        RELEASE.with_section(changelog, "0.2.0", "2026-03-04", [])
