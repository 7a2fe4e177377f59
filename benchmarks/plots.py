"""The plots of results.md. Nothing is drawn where matplotlib is not installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import processor

HERE = Path(__file__).parent
COLORS = ("#2f6fa8", "#b04a4a", "#d79a4a", "#7a7a7a", "#2a8f6a", "#8a63a8", "#4a4a4a")
"""Ours first."""


def place(name: str) -> Path:
    """The file ``name`` in a folder of the processor at hand."""
    return HERE / "results" / processor.slug(processor.name()) / name


def link(title: str, path: Path) -> str:
    """Shows a plot in ``results.md``."""
    return f"![{title}]({path.relative_to(HERE).as_posix()})"


def draw(path: Path, plot: Callable[[Any], None], size: tuple[float, float] = (6.4, 3.8)) -> bool:
    """Let ``plot`` draw on axes of the common style and save them; false without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False

    matplotlib.use("agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kvloom", "font.family": "sans-serif"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    plot(axes)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def share_of_the_limit(result: dict[str, Any], path: Path, context: int = 4096) -> bool:
    """Bars: the speed of each contender by that of reading what our cache stores, for each kind of cache."""
    rows = [row for row in result["rows"] if (row["batch"], row["context"]) == (1, context)]
    names = ["ours", *result["peers"]]

    def plot(axes: Any) -> None:
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            bars = [
                (x, row["of_read_speed"][name]) for x, row in enumerate(rows) if name in row["of_read_speed"]
            ]
            places = [x + (i - (len(names) - 1) / 2) * width for x, _ in bars]
            label = "kvloom" if name == "ours" else name
            axes.bar(places, [share for _, share in bars], width * 0.92, color=COLORS[i], label=label)
        axes.axhline(1.0, color="#4a4a4a", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(rows)), [row["kind"] for row in rows])
        axes.set_ylabel("share of the speed of a read")
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return bool(rows) and draw(path, plot, (7.2, 4.0))


def time_by_context(result: dict[str, Any], path: Path) -> bool:
    """Lines: microseconds of a call over bfloat16, ours over codes too, and a read of the bfloat16."""
    rows = [row for row in result["rows"] if row["batch"] == 1]
    kinds = [kind for kind in ("int8 g64", "int4 g64") if any(row["kind"] == kind for row in rows)]
    lines = [("bfloat16", "ours", "kvloom bfloat16"), *((kind, "ours", f"kvloom {kind}") for kind in kinds)]
    lines += [("bfloat16", name, name) for name in result["peers"]]
    lines += [("bfloat16", "probe", "read of the bfloat16")]
    styles = {"ours": "o-", "probe": "--"}
    shades = {f"kvloom {kind}": shade for kind, shade in zip(kinds, ("#6a9fd0", "#a5c8e8"), strict=False)}
    colors = dict(zip(["ours", *result["peers"]], COLORS, strict=False)) | {"probe": "#4a4a4a"}

    def plot(axes: Any) -> None:
        for kind, name, label in lines:
            found = sorted(
                (row["context"], row["us"][name]) for row in rows if row["kind"] == kind and name in row["us"]
            )
            if found:
                color = shades.get(label, colors[name])
                axes.plot(*zip(*found, strict=True), styles.get(name, "s-"), color=color, label=label, ms=4)
        contexts = sorted({row["context"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(contexts, [f"{x:,}" for x in contexts])
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("one layer's decode step, us")
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))

    return bool(rows) and draw(path, plot, (7.6, 4.0))
