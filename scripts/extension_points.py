"""Names every place where kvloom enters transformers, what was there before, and fails where one is gone.

``python scripts/extension_points.py`` in any environment that has transformers; ``make test-upcoming`` in one
with its newest version, prereleases among them, which is worth a run each week. A point is a name, the
parameters by which kvloom calls it, and the file that does. Where a version renamed it, it has all names.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import transformers
from packaging.version import Version

SOURCES: Final = Path(__file__).parents[1] / "src" / "kvloom"
BATCHING: Final = "transformers.generation.continuous_batching"


class Point(NamedTuple):
    """Where kvloom enters transformers.

    Attributes:
        names: ``module.Class.member``, ``module.Class.member(parameter, ...)`` or, of an instance,
            ``module.Class:attribute``; what replaced another before it.
        file: That enters there, below ``src/kvloom``.
        since: The first version of transformers that has it, of those that kvloom supports.
    """

    names: tuple[str, ...]
    file: str
    since: str = "4.57.6"


def _members(owner: str, members: str, file: str, since: str = "4.57.6") -> list[Point]:
    return [Point((f"{owner}.{member}",), file, since) for member in members.split()]


_OURS: Final = "integrations/transformers"
_MODEL: Final = "transformers.PreTrainedModel"
_GENERATION: Final = "transformers.GenerationMixin"
_CACHE: Final = "transformers.cache_utils.Cache"

POINTS: Final = [
    *_members(_GENERATION, "_prepare_cache_for_generation", f"{_OURS}/enabling.py"),
    *_members(_GENERATION, "_validate_generation_mode", f"{_OURS}/assisted.py"),
    *_members(_GENERATION, "generate _sample _assisted_decoding", f"{_OURS}/session/drafts/generate.py"),
    *_members(_MODEL, "set_attn_implementation", f"{_OURS}/attention/held.py"),
    *_members(_GENERATION, "init_continuous_batching", f"{_OURS}/session/__init__.py", "5.19"),
    *_members(
        _GENERATION, "destroy_cached_continuous_batching_manager", f"{_OURS}/session/__init__.py", "5.19"
    ),
    *_members(_MODEL, "_can_set_attn_implementation", f"{_OURS}/session/served.py"),
    Point(("transformers.PretrainedConfig:_attn_implementation_internal",), f"{_OURS}/cache/layers.py"),
    Point(
        (
            "transformers.modeling_outputs.BaseModelOutputWithPast.cache",
            "transformers.modeling_outputs.BaseModelOutputWithPast.past_key_values",
        ),
        f"{_OURS}/models/cache_argument.py",
    ),
    Point(
        (f"{_CACHE}.get_mask_sizes(query_length)", f"{_CACHE}.get_mask_sizes(cache_position)"),
        f"{_OURS}/cache/kv_cache.py",
    ),
    Point(
        (f"{_CACHE}.get_query_offset(layer_idx)", f"{_CACHE}.get_seq_length(layer_idx)"),
        f"{_OURS}/cache/lengths.py",
    ),
    Point(
        (f"{_CACHE}.update(key_states, value_states, layer_idx)",),
        f"{_OURS}/cache/kv_cache.py",
    ),
    *_members("transformers.DynamicCache", "reorder_cache crop reset", f"{_OURS}/cache/kv_cache.py"),
    Point(("transformers.DynamicCache:layers",), f"{_OURS}/models/layer_specs.py"),
    *_members(
        _CACHE, "activate_past_recording update_recurrent_state", f"{_OURS}/cache/stateful_cache.py", "5.19"
    ),
    *_members("transformers.cache_utils", "DummyLayer", f"{_OURS}/models/layer_specs.py", "5.24"),
    *_members(
        "transformers.cache_utils",
        "DynamicLayer DynamicSlidingWindowLayer",
        f"{_OURS}/models/layer_specs.py",
    ),
    *_members(
        "transformers.cache_utils",
        "DynamicIndexedLayer LinearAttentionLayer LinearAttentionCacheLayerMixin",
        f"{_OURS}/models/layer_specs.py",
        "5.19",
    ),
    *_members(
        "transformers.cache_utils", "LinearAttentionAndFullAttentionLayer", f"{_OURS}/cache/layers.py", "5.19"
    ),
    *_members(
        "transformers.AttentionInterface",
        "register",
        f"{_OURS}/__init__.py",
    ),
    *_members("transformers.AttentionMaskInterface", "register", f"{_OURS}/__init__.py"),
    *_members(
        f"{BATCHING}.continuous_api.ContinuousBatchingManager",
        "switch_to_cb_friendly_attn stop add_request join _create_batch_processor _generation_step",
        f"{_OURS}/session/manager.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.continuous_api.ContinuousBatchProcessor",
        "_handle_request_error reset",
        f"{_OURS}/session/manager.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.scheduler.Scheduler",
        "add_waiting_request schedule_batch(token_budget,cache_budget) finish_request "
        "clear_cancelled_requests _infer_request_tokens _get_waiting_candidates",
        f"{_OURS}/session/scheduler.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.cb_logits_processors.ContinuousBatchingLogitsProcessor",
        "fill_defaults",
        f"{_OURS}/session/choices/penalties.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.cb_logits_processors.ContinuousBatchingLogitsProcessor",
        "prepare_tensor_args",
        f"{_OURS}/session/choices/sampling.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.cb_logits_processors.ContinuousBatchingLogitsProcessorList",
        "prepare_tensor_args",
        f"{_OURS}/session/choices/prompt_scores.py",
        "5.19",
    ),
    *_members(
        f"{BATCHING}.continuous_api.OutputRouter",
        "deliver deliver_batch",
        "serving/answering/session.py",
        "5.19",
    ),
]


def imports() -> Iterator[Point]:
    """What the sources import from transformers by name."""
    found: dict[str, Point] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        file = path.relative_to(SOURCES).as_posix()
        is_of_sessions = "session/" in file or file.startswith("serving/")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    since = "5.19" if is_of_sessions or "ContinuousBatching" in name else "4.57.6"
                    found.setdefault(name, Point((name,), file, since))
    yield from found.values()


def why_gone(name: str) -> str | None:
    """What of a name the installed transformers has not; ``None`` if it has all."""
    path, _, parameters = name.removesuffix(")").partition("(")
    path, _, attribute = path.partition(":")
    parts = path.split(".")
    owner: Any = transformers
    for i, part in enumerate(parts[1:], 2):
        found = getattr(owner, part, None)
        if found is None:
            try:
                found = import_module(".".join(parts[:i]))
            except ImportError:
                annotations = getattr(owner, "__annotations__", {})
                if part in annotations and i == len(parts):
                    return None
                return f"there is no {'.'.join(parts[:i])}"
        owner = found
    if attribute and not hasattr(owner(), attribute):
        return f"a {path} has no {attribute}"
    taken = inspect.signature(owner).parameters if parameters else {}
    missing = [x for x in parameters.replace(" ", "").split(",") if x and x not in taken]
    return f"{path} takes no {', '.join(missing)}" if missing else None


def report(points: list[Point], version: str) -> tuple[list[str], list[str]]:
    """A line for each point that ``version`` should have, and a sentence for each that is gone."""
    lines, gone = [], []
    for point in points:
        if Version(version).release < Version(point.since).release:
            continue
        reasons = [why_gone(name) for name in point.names]
        if None in reasons:
            where = reasons.index(None)
            before = "".join(f", before: {name}" for name in point.names[where + 1 :])
            lines.append(f"{point.names[where]} ({point.file}{before})")
        else:
            gone.append(
                f"transformers {version}: {reasons[0]}, which src/kvloom/{point.file} needs, or what "
                "replaced it"
            )
    return lines, gone


def main() -> int:
    """Print the points; 1 if one is gone."""
    lines, gone = report([*POINTS, *imports()], transformers.__version__)
    print(f"transformers {transformers.__version__}")
    print("\n".join(lines))
    print("\n".join(gone), file=sys.stderr)
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
