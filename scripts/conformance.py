"""Run every peer that is installed and write the table of outcomes in docs/conformance.md."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvloom.conform.operators import OPERATORS
from kvloom.conform.running import Outcome, run
from kvloom.conform.targets import open_target
from kvloom.conform.vectors import published, read

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- written by scripts/conformance.py -->\n", "<!-- end -->\n"
OURS = "kvloom.conform.peers:"
RUNS = (
    ("kvloom", "pmx.key_value_cache", f"{OURS}key_value_cache"),
    ("kvloom", "pmx.dynamic_batching.key_value_cache", f"{OURS}dynamic_key_value_cache"),
    ("kvloom", "pmx.dynamic_batching.multi_head_cache_attention", f"{OURS}multi_head_cache_attention"),
    ("kvloom", "opmx.dynamic_batching.multi_head_cache_attention", f"{OURS}opmx_multi_head_cache_attention"),
    ("kvloom", "ascend.scatter_pa_kv_cache", f"{OURS}scatter_pa_kv_cache"),
    ("kvloom", "ascend.gather_pa_kv_cache", f"{OURS}gather_pa_kv_cache"),
    ("kvloom", "microsoft.paged_attention", f"{OURS}paged_attention"),
    ("kvloom", "vllm.reshape_and_cache", f"{OURS}reshape_and_cache"),
    ("kvloom", "vllm.reshape_and_cache_flash", f"{OURS}reshape_and_cache_flash"),
    ("kvloom", "vllm.copy_blocks", f"{OURS}copy_blocks"),
    ("kvloom", "flashinfer.append_paged_kv_cache", f"{OURS}append_paged_kv_cache"),
    ("kvloom", "transformers.cache_update", f"{OURS}kvloom_cache_update"),
    ("kvloom", "onnx.linear_attention", f"{OURS}linear_attention"),
    ("kvloom", "onnx.causal_conv_with_state", f"{OURS}causal_conv_with_state"),
    ("onnxruntime", "onnx.tensor_scatter", "onnxruntime"),
    ("onnxruntime", "onnx.attention_23", "onnxruntime"),
    ("onnxruntime", "onnx.attention", "onnxruntime"),
    ("onnxruntime", "onnx.attention_25", "onnxruntime"),
    ("onnxruntime", "microsoft.group_query_attention", "onnxruntime"),
    ("onnxruntime", "onnx.linear_attention", "onnxruntime"),
    ("onnxruntime", "onnx.causal_conv_with_state", "onnxruntime"),
    ("onnx", "onnx.tensor_scatter", "onnx.reference"),
    ("onnx", "onnx.attention_23", "onnx.reference"),
    ("onnx", "onnx.attention", "onnx.reference"),
    ("onnx", "onnx.attention_25", "onnx.reference"),
    ("onnx", "onnx.linear_attention", "onnx.reference"),
    ("onnx", "onnx.causal_conv_with_state", "onnx.reference"),
    ("transformers", "transformers.cache_update", f"{OURS}cache_update"),
)


def _what(outcome: Outcome) -> str:
    """What failed, without what is of one vector alone: ``Y differs``, ``a legal call was refused``."""
    if outcome.vector.expected is None:
        return outcome.vector.about
    return outcome.message.split(":")[0].split(" at ")[0]


def main() -> None:
    """Write the table."""
    lines = [
        "| implementation | dialect | passed | failed | skipped | what failed |",
        "|---|---|--:|--:|--:|---|",
    ]
    for package, dialect, target in RUNS:
        try:
            name = f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
        report = run(open_target(target), read(published(), dialect), target)
        wrong = sorted({_what(outcome) for outcome in report.failures})
        counts = " | ".join(str(report.count(status)) for status in ("passed", "failed", "skipped"))
        lines.append(f"| {name} | `{dialect}` | {counts} | {'; '.join(wrong)} |")
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(
        before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1], encoding="utf-8"
    )
    print(f"{len(RUNS)} runs over {len(OPERATORS)} dialects")


if __name__ == "__main__":
    main()
