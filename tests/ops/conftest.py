"""Says at the end how near attention came to what is allowed."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The worst error of attention by dtype, in units of plain torch's error; 2 is allowed."""
    worst: dict[str, float] = {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "worst attend ratio" and report.when == "call":
                dtype, ratio = value
                worst[dtype] = max(ratio, worst.get(dtype, 0.0))
    if worst:
        terminalreporter.write_line(
            "worst attend ratio (2 is allowed): "
            + ", ".join(
                f"{dtype.removeprefix('torch.')} {ratio:.3f}" for dtype, ratio in sorted(worst.items())
            )
        )
