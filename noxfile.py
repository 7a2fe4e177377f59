"""Environments of other versions, each in ``.nox``; nothing runs unless it is named.

``.venv/bin/nox -s transformers`` runs all that are named below, ``nox -s 'transformers(4.57.6)'`` one,
``nox -s torch -- tests/caches`` other tests, ``nox --install-only -s ...`` only makes the environments, and
``nox -R -s ...`` takes those that are there. The kernels are those of ``.venv``, which ``make`` builds.
"""

import os
import shlex
from pathlib import Path

import nox

TORCH = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
TRANSFORMERS = ["4.57.6", "5.19.0", "5.21.0", "5.23.0", "5.24.0"]
TORCHES = ["2.10.0", "2.15.0"]
"""The oldest that pyproject.toml allows and the newest."""
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
WORKERS = ["--numprocesses", os.environ.get("WORKERS", "2"), "--dist", "worksteal"]
BUILD = ["scikit-build-core>=0.11", "cmake", "ninja"]
UNBUILT = ["--no-build-isolation", "--config-settings", "wheel.cmake=false"]
TESTING = ["pytest", "pytest-xdist", "hypothesis"]

nox.options.sessions = []
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def run_tests(session: nox.Session, title: str, tests: list[str], *options: str, **variables: str) -> None:
    """Run these tests, or those that were named; the title is what scripts/hosts.py looks for."""
    print(title, flush=True)
    session.run("python", "-m", "pytest", "--quiet", *options, *(session.posargs or tests), env=variables)


def kernels(session: nox.Session) -> dict[str, str]:
    """What lets an environment use the kernels of ``.venv``."""
    found = sorted(Path(".venv").glob("lib/python*/site-packages/kvloom/ops/impl/libkvloom_cpu.*"))
    if not found:
        session.error("there are no kernels in .venv: make check or make test builds them")
    return {"KVLOOM_LIBRARY": str(found[0].resolve())}


@nox.session
@nox.parametrize("version", TRANSFORMERS, ids=TRANSFORMERS)
def transformers(session: nox.Session, version: str) -> None:
    """All integrations with another transformers."""
    library = kernels(session)
    session.install(*TORCH)
    session.install(*BUILD)
    others = [f"transformers=={version}", "peft", "rich", "xxhash", *TESTING]
    session.install(*UNBUILT, "--editable", ".", *others)
    tests = ["tests/integrations", "tests/measuring"]
    run_tests(session, f"transformers {version}", tests, *WORKERS, **library)


@nox.session
@nox.parametrize("version", TORCHES, ids=TORCHES)
def torch(session: nox.Session, version: str) -> None:
    """Operators and caches, installed beside another torch; PyPI's brings gigabytes of CUDA."""
    library = kernels(session)
    alone = {"PIP_CONSTRAINT": "/dev/null"}  # a machine may have constraints of its own on torch
    session.install(f"torch=={version}", env=alone)
    session.install(*BUILD)
    session.install(f"torch=={version}", "transformers>=5.19", "rich", "xxhash", *TESTING, env=alone)
    session.install(*UNBUILT, "--force-reinstall", "--no-deps", "./model", ".")
    session.run("python", "scripts/smoke.py", env=library)
    # Without the kernels of Triton, whose own version decides, and torch's slow checks of schemas.
    skipped = ["--ignore-glob=*/test_triton_*", "--ignore-glob=*/test_opcheck*"]
    run_tests(session, f"torch {version}", ["tests/ops", "tests/caches"], *WORKERS, *skipped, **library)


@nox.session(python=PYTHONS)
def wheel(session: nox.Session) -> None:
    """The wheel of dist, which ``make wheel`` builds, with another Python and a torch of its own."""
    session.install(*TORCH, "transformers>=5.19", "rich", "xxhash")
    others = ["tests/contracts/test_imports.py", "tests/core", "tests/paging"]
    try_wheel(session, ["tests/test_tiny.py", "tests/test_cli.py", *others])


@nox.session(python=PYTHONS)
def bare(session: nox.Session) -> None:
    """The same without a torch: what needs none."""
    try_wheel(session, ["tests/paging"], "--confcutdir", "tests/paging", "--hypothesis-profile", "ci")


def try_wheel(session: nox.Session, tests: list[str], *options: str) -> None:
    """Install the wheel without what it depends on, and run tests."""
    session.install("pytest", "hypothesis")
    session.install("--force-reinstall", "--no-deps", *map(str, sorted(Path("dist").glob("*.whl"))))
    session.run("kvloom", "--version")
    run_tests(session, f"Python {session.python}", tests, *options)
