"""What the page of tested versions takes from what ``make`` prints."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest


def script(name: str) -> Any:
    """A module of scripts, which are on no path."""
    spec = spec_from_file_location(name, Path(__file__).parents[2] / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hosts = script("hosts")


@pytest.mark.parametrize(
    ("label", "printed", "expected"),
    [
        (
            "torch ",
            [
                "torch 2.10.0",
                "....  [100%]",
                "24 passed, 3 skipped in 9.1s",
                "torch 2.15.0",
                "1 failed, 2 passed in 3s",
            ],
            {"2.10.0": "24 passed, 3 skipped", "2.15.0": "1 failed, 2 passed"},
        ),
        (
            "Python ",
            ["no python3.12 on this machine", "Python 3.13", "7 passed in 0.1s"],
            {"3.12": "not here", "3.13": "7 passed"},
        ),
        ("KVLOOM_ISA=", ["KVLOOM_ISA=amx", "not on this machine"], {"amx": "not here"}),
        ("", ["24 passed in 3.05s"], {"": "24 passed"}),
    ],
)
def test_versions_and_their_results(label: str, printed: list[str], expected: dict[str, str]) -> None:
    assert dict(hosts.results_of(printed, label)) == expected


def test_the_page_is_read_as_it_is_written() -> None:
    rows = [
        hosts.Row("LMCache", "1", "x", "3 passed", "today"),
        hosts.Row("torch", "2", "y", "1 failed", "now"),
    ]
    page = hosts.write(rows)
    assert hosts.write(hosts.read(page).values()) == page
    assert page.index("torch | 2") < page.index("LMCache | 1")


def test_hosts_are_targets_of_make_and_sessions_of_nox() -> None:
    makefile, sessions = ((hosts.ROOT / x).read_text(encoding="utf-8") for x in ("Makefile", "noxfile.py"))
    for host in hosts.HOSTS.values():
        kind, _, session = host.target.rpartition(" ")
        assert f"\ndef {session}(" in sessions if kind == "nox" else f"\n{host.target}:" in makefile
    assert hosts.variable("LMCACHE") in makefile
