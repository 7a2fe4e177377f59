"""Versions of transformers: what is supported, what pip may install, and what is refused by one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers.versions import expect_supported

VERSIONS = {
    "4.56.2": False,
    "4.57.5": False,
    "4.57.6": True,
    "5.0.0": False,
    "5.3.0": False,
    "5.12.0": False,
    "5.18.4": False,
    "5.19.0": True,
    "5.24.0": True,
    "5.24.1": True,
    "5.100.0": True,
    "6.0.0": True,
}
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
IMPORT = """
import sys, transformers
transformers.__version__ = sys.argv[1]
import kvloom.integrations.transformers
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_supported_is_what_pip_may_install(version: str) -> None:
    (said,) = re.findall(r'^transformers = \["transformers([^"]*)"', PROJECT.read_text("utf-8"), re.MULTILINE)
    assert SpecifierSet(said).contains(version) == VERSIONS[version]
    if VERSIONS[version]:
        expect_supported(version)
    else:
        message = rf"^transformers must be 4\.57\.6, or 5\.19\.0 or newer, got {re.escape(version)}$"
        with pytest.raises(UnsupportedError, match=message):
            expect_supported(version)


def test_a_prerelease_of_a_supported_version_is_taken() -> None:
    for version in ("5.19.0.dev0", "5.25.0rc1"):
        expect_supported(version)


@pytest.mark.process
def test_importing_the_integration_refuses_others_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, "5.12.0"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "UnsupportedError: transformers must be 4.57.6, or 5.19.0 or newer, got 5.12.0"
    )
