"""Compiles the kernels of this checkout once, without optimizing, and after that only what a bug changes."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"
"""Where ``ninja`` keeps what it compiled, so that the next run compiles what changed since."""
_TARGET = "kvloom_cpu"


class CompileError(Exception):
    """The sources do not compile."""


@dataclass(frozen=True)
class Kernels:
    """How the library is made of the sources.

    Attributes:
        root: Of the sources.
        library: The library.
        compile: By each source, the command that makes its object file.
        objects: By each source, its object file as commands have it.
        reads: By each source, the files below ``root`` that it includes, itself included.
        link: The command that makes the library of all object files.
    """

    root: Path
    library: Path
    compile: Mapping[Path, str]
    objects: Mapping[Path, str]
    reads: Mapping[Path, Collection[Path]]
    link: str

    @classmethod
    def read(cls, root: Path, build: Path, commands: str, deps: str) -> "Kernels":
        """From what ``ninja -t commands`` and ``ninja -t deps`` say of a library that is built."""
        *compiling, link = commands.splitlines()
        compile, objects = dict[Path, str](), dict[Path, str]()
        for line in compiling:
            made = re.search(r" -o (\S+) -c (\S+)$", line)
            if made is not None:
                compile[Path(made[2])], objects[Path(made[2])] = line, made[1]
        read = {
            name: {x for x in map(Path, map(os.path.normpath, files.split())) if x.is_relative_to(root)}
            for name, files in re.findall(r"^(\S+): #deps.*\n((?: .*\n)*)", deps, re.MULTILINE)
        }
        library = re.findall(r" -o (\S+) ", link)
        reads = {source: read[name] for source, name in objects.items()}
        return cls(root, build / library[-1], compile, objects, reads, link)

    def changed_units(self, changed: Collection[Path], isa: str) -> list[Path]:
        """Sources that include one of ``changed``, less those of other instruction sets than ``isa``."""
        mine = f"isa_{isa.replace('-', '_')}"
        units = [source for source, files in self.reads.items() if not files.isdisjoint(changed)]
        return sorted(x for x in units if not x.stem.startswith("isa_") or x.stem == mine)

    def commands(self, copy: Path, changed: Collection[Path], isa: str) -> list[str]:
        """Commands that make a library in ``copy``, whose sources differ in the files ``changed``.

        Args:
            copy: Has all sources below it.
            changed: Paths below ``root``.
            isa: The instruction set that the library has of the changed sources; others are as they were.
        """
        made, link = [], self.link.replace(f" -o {self.library.name} ", f" -o {copy / self.library.name} ")
        for source in self.changed_units(changed, isa):
            old, new = self.objects[source], str(copy / f"{source.stem}.o")
            there = self.compile[source].replace(old, new)
            made.append(there.replace(str(source), str(copy / source.relative_to(self.root))))
            link = link.replace(old, new)
        return [*made, link]

    def made_with(self, copy: Path, changed: Collection[Path], isa: str) -> Path:
        """The library that ``commands`` make; raises CompileError."""
        for command in self.commands(copy, changed, isa):
            _run(command, self.library.parent)
        return copy / self.library.name


def build_kernels() -> Kernels:
    """Those of this checkout, brought up to date; raises CompileError."""
    cmake, ninja = _tool("cmake"), _tool("ninja")
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    kernels = ["-DCMAKE_CXX_FLAGS_RELEASE=-O0", "-DKVLOOM_EMULATED_TILES=ON"]
    _run([cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options, *kernels])
    _run([cmake, "--build", str(BUILD), "--target", _TARGET])
    says = [_run([ninja, "-C", str(BUILD), "--quiet", "-t", *what]) for what in (["commands"], ["deps"])]
    return Kernels.read(ROOT, BUILD, *says)


def _tool(name: str) -> str:
    """One that ``make`` installed beside this interpreter, or that the machine has."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    if found is None:
        raise CompileError(f"{name} is not installed")
    return found


def _run(command: Sequence[str] | str, folder: Path = ROOT) -> str:
    """What a command says."""
    done = subprocess.run(
        command, cwd=folder, shell=isinstance(command, str), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompileError(f"{command}:\n{done.stdout}{done.stderr}")
    return done.stdout
