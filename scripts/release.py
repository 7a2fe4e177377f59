"""Prepares a release and checks it; ``make release VERSION=0.2.0`` calls it before and after it builds.

``prepare`` writes the version and the changelog's section. ``check`` looks at every file in ``dist``, and
prints what a person then calls to upload them. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from datetime import date
from email.parser import Parser
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
FILES: Final = {"kvloom_conform": "vectors", "kvloom_model": "model"}
"""Distributions of files alone, which extras of kvloom ask for, and their folders."""
MAX_BYTES: Final = {"kvloom": 3_000_000, "kvloom_conform": 4_000_000, "kvloom_model": 9_000_000}
"""Of a wheel."""
GLIBC: Final = 28
"""Of 2.28, with which every wheel of kvloom must run."""
ARCHITECTURES: Final = {"x86_64": "", "aarch64": "aarch64/"}
"""Of which there are wheels, and their folders below ``dist``."""
LIBRARY: Final = "kvloom/ops/impl/libkvloom_cpu.so"
VERSION: Final = re.compile(r'^version = "([^"]+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """The release is not what users may get."""


def with_section(changelog: str, version: str, day: str, subjects: Sequence[str]) -> str:
    """The changelog with a section of this version, below an empty one for what follows.

    Args:
        changelog: Text with a line ``## Unreleased``.
        version: As in ``## 0.2.0 (2026-11-26)``. If there is such a section, the text is returned as it is.
        day: Of the release.
        subjects: Of commits since the last release, which are listed if nobody has written what is new.

    Raises:
        ReleaseError: There is no section of what is unreleased, or it is empty and there are no commits.
    """
    if re.search(rf"^## {re.escape(version)} ", changelog, re.MULTILINE):
        return changelog
    found = re.fullmatch(r"(.*^## Unreleased\n)(.*?)(^## .*)?", changelog, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError("CHANGELOG.md must have a section '## Unreleased', got none")
    news = found[2].strip() or "\n".join(f"* {subject}" for subject in subjects)
    if not news:
        raise ReleaseError(f"version must have something new, got no commit since the last tag for {version}")
    return f"{found[1]}\n## {version} ({day})\n\n{news}\n" + (f"\n{found[3]}" if found[3] else "")


def runs_on(tag: str, machine: str) -> bool:
    """Whether a platform tag is for such a machine with glibc 2.28, or one of before; or is ``"any"``."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag)
    return tag == machine if found is None else found[2] == machine and int(found[1]) <= GLIBC


def check_wheel(path: Path, name: str, version: str, machine: str) -> dict[str, int]:
    """Check size, name, tags and metadata of a wheel.

    Args:
        path: Of the wheel.
        name: Of the distribution, as file names spell it.
        version: Of the distribution.
        machine: Whose it is: ``"any"``, or the processor of a Linux with glibc 2.28.

    Returns:
        The checksum of each file in it that is neither the library nor about the wheel.

    Raises:
        ReleaseError: Something of it is not as expected; the message says what.
    """
    file_name = path.name.removesuffix(".whl").split("-")
    platforms = file_name[-1].split(".")
    if file_name[:4] != [name, version, "py3", "none"] or not any(runs_on(x, machine) for x in platforms):
        wanted = machine if machine == "any" else f"manylinux_2_{GLIBC}_{machine} or older"
        raise ReleaseError(f"a wheel must be {name}-{version}-py3-none for {wanted}, got {path.name}")
    if path.stat().st_size > MAX_BYTES[name]:
        raise ReleaseError(
            f"{path.name} must have at most {MAX_BYTES[name]:,} bytes, got {path.stat().st_size:,}"
        )
    with zipfile.ZipFile(path) as archive:
        about = f"{name}-{version}.dist-info"
        tags = Parser().parsestr(archive.read(f"{about}/WHEEL").decode()).get_all("Tag", [])
        metadata = Parser().parsestr(archive.read(f"{about}/METADATA").decode())
        contents = {entry.filename: entry.CRC for entry in archive.infolist() if not entry.is_dir()}
        if (damaged := archive.testzip()) is not None:
            raise ReleaseError(f"{path.name} must be whole, got a damaged {damaged}")
    if sorted(tags) != sorted(f"py3-none-{tag}" for tag in platforms):
        raise ReleaseError(f"tags in {path.name} must be those of its name, got {tags}")
    if (metadata["Name"].replace("-", "_"), metadata["Version"]) != (name, version):
        raise ReleaseError(f"{path.name} must say its name, got {metadata['Name']} {metadata['Version']}")
    if (LIBRARY in contents) != (machine != "any"):
        raise ReleaseError(f"{path.name} must have {LIBRARY} where it is for one platform, and only there")
    foreign = [file for file in contents if file.split("/")[0] not in (name, about)]
    if foreign:
        raise ReleaseError(f"{path.name} must have files of {name} only, got {foreign[0]}")
    return {x: crc for x, crc in contents.items() if x != LIBRARY and not x.startswith(about)}


def check_sdist(path: Path, name: str, version: str) -> None:
    """Check that the archive has a license and metadata of this version, in a folder of its name.

    Raises:
        ReleaseError: It lacks one.
    """
    folder = f"{name}-{version}"
    with tarfile.open(path) as archive:
        names = archive.getnames()
    for wanted in ("PKG-INFO", "pyproject.toml", "LICENSE"):
        if f"{folder}/{wanted}" not in names:
            raise ReleaseError(f"{path.name} must have {folder}/{wanted}, got none")


def check(dist: Path, version: str, files_versions: dict[str, str]) -> list[Path]:
    """Check all files of a release, and that wheels differ in the library only.

    Args:
        dist: Folder of what is built.
        version: Of kvloom.
        files_versions: Of the distributions in ``FILES``.

    Returns:
        What is to be uploaded: both of each of ``FILES``, which extras of kvloom ask for, then kvloom.

    Raises:
        ReleaseError: A file is missing, there is another one, or one is not as expected.
    """
    upload, contents = [], []
    for name, number in files_versions.items():
        wheel = _only_wheel(dist, name)
        check_wheel(wheel, name, number, "any")
        upload += [wheel, _checked_sdist(dist, name, number)]
    for architecture, folder in ARCHITECTURES.items():
        wheel = _only_wheel(dist / folder, "kvloom")
        contents.append(check_wheel(wheel, "kvloom", version, architecture))
        upload.append(wheel)
    if any(content != contents[0] for content in contents):
        raise ReleaseError("wheels of kvloom must differ in the library only: one is of other sources")
    return [*upload, _checked_sdist(dist, "kvloom", version)]


def _only_wheel(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"{name}-*.whl"))
    if len(found) != 1:
        raise ReleaseError(f"{folder} must have one wheel of {name}, got {[x.name for x in found]}")
    return found[0]


def _checked_sdist(dist: Path, name: str, version: str) -> Path:
    path = dist / f"{name}-{version}.tar.gz"
    if not path.is_file():
        raise ReleaseError(f"{dist} must have {path.name}, got none")
    check_sdist(path, name, version)
    return path


def read_version(folder: Path) -> str:
    """The version in a folder's ``pyproject.toml``."""
    return VERSION.findall((folder / "pyproject.toml").read_text(encoding="utf-8"))[0]


def prepare(version: str | None) -> None:
    """Write the version, if one is given, and the changelog's section."""
    project, changelog = ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"
    if version is not None:
        text = VERSION.sub(f'version = "{version}"', project.read_text(encoding="utf-8"), count=1)
        project.write_text(text, encoding="utf-8")
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*")
    subjects = _git("log", "--format=%s", "--no-merges", *([f"{tag}..HEAD"] if tag else [])).splitlines()
    text = changelog.read_text(encoding="utf-8")
    new = with_section(text, read_version(ROOT), date.today().isoformat(), subjects)
    if new != text:  # whose time would have everything built again
        changelog.write_text(new, encoding="utf-8")


def _git(*arguments: str) -> str:
    """What git prints; nothing where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=["prepare", "check"])
    parser.add_argument("--version", help="of the release (default: that of pyproject.toml)")
    args = parser.parse_args()
    try:
        if args.step == "prepare":
            prepare(args.version or None)
            return
        version = read_version(ROOT)
        files = check(ROOT / "dist", version, {x: read_version(ROOT / y) for x, y in FILES.items()})
    except ReleaseError as error:
        sys.exit(f"release: {error}")
    names = [str(path.relative_to(ROOT)) for path in files]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *names], cwd=ROOT, check=True)
    for path, name in zip(files, names, strict=True):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {name}")
    print("\nall of it is as it should be. To publish it, what extras ask for first:\n")
    print(
        f"    git commit --all --message 'release: {version}' && git tag v{version} && git push --follow-tags"
    )
    for i in range(0, 2 * len(FILES), 2):
        print(f"    twine upload {' '.join(names[i : i + 2])}  # if this version of it is not there yet")
    print(f"    twine upload {' '.join(names[2 * len(FILES) :])}")


if __name__ == "__main__":
    main()
