"""kvloom inside vLLM beside vLLM's own attention; writes sections of ``vllm_results.md``.

``attend`` times one layer in vLLM's pages, with AMX and without; ``latents`` one of latent attention;
``generate`` tokens after a long context; ``prefix`` requests that share one. Contenders take turns in one
process, and figures are medians of the processor time of one thread. ``store`` reads a prefix that another
process computed: contenders take turns in processes of their own, by the clock. ``drafts`` decodes text that
copies in engines with n-gram drafts, and in sessions of transformers with drafts. ``quality`` compares
distributions of next tokens. For the environment of ``make test-vllm``.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Final

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
    NUMBA_NUM_THREADS="1",  # n-gram drafts otherwise give torch as many threads as numba has
    VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
)  # fmt: skip

import processor
import session_drafts
import torch
import vllm_latents
import vllm_quality
from rounds import in_turn, ratio, turns_for
from vllm import LLM, SamplingParams, TokensPrompt
from vllm import _custom_ops as kernels
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvloom import ops
from kvloom.core.specs import QuantSpec
from kvloom.integrations.vllm import vllm_version
from kvloom.integrations.vllm.builder import VllmStep
from kvloom.integrations.vllm.pages import PageFormat
from kvloom.models import bundled_model_path
from kvloom.ops.choice import choose_isa

HEADS, QUERY_HEADS, DIM, PAGE = 8, 32, 128, 128
CASES = ((1, 1, 512), (1, 1, 4096), (8, 1, 4096), (64, 1, 560), (1, 2048, 2048))
"""Sequences, new tokens and stored ones of each."""
KINDS = {"kvloom bfloat16": None, "kvloom int8": QuantSpec(8), "kvloom int4": QuantSpec(4)}
ENGINES = {
    "vLLM bfloat16": {},
    "vLLM fp8": {"kv_cache_dtype": "fp8_e4m3"},
    "kvloom bfloat16": {"additional_config": {"kvloom": {"float": True}}},
    "kvloom int8": {"kv_cache_dtype": "int8_per_token_head"},
    "kvloom int4": {"kv_cache_dtype": "int4_per_token_head"},
}
VOCABULARY = 2048


PAGE_OF_RESULTS = Path(__file__).with_name("vllm_results.md")
HEAD = """# Figures inside vLLM

Made by `make bench-vllm`, or a part of it such as `make bench-vllm ARGS=latents`. In brackets the multiple of
the first column, the median over rounds in which all take turns in one process; below 1 is faster. Processor
time of one thread, but for the time to the first token, which is by the clock, in a process for each
contender. Others may use the machine meanwhile, so multiples hold where times do not.
"""


def table(title: str, heads: list[str], rows: list[list[str]]) -> None:
    """Write a section, in the place of the one that this processor had."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    versions = f"torch {torch.__version__}, vllm-cpu {vllm_version()}"
    where = f"{processor.name()}, {versions}, {date.today()}."
    section = "\n".join([f"{title}\n", *lines, "", where, ""])
    text = PAGE_OF_RESULTS.read_text(encoding="utf-8") if PAGE_OF_RESULTS.exists() else HEAD
    _, *others = text.split("\n## ")
    kept = [x for x in others if not (x.startswith(f"{title}\n") and processor.name() in x)]
    PAGE_OF_RESULTS.write_text("\n## ".join([HEAD, *kept, section]), encoding="utf-8")
    print(f"\n## {section}")


def compared(times: dict[str, list[float]], show: Callable[[float], str]) -> list[str]:
    """Each contender's median, and in brackets the median of its multiples of the first one's."""
    base = next(iter(times.values()))
    cells = [show(median(taken)) for taken in times.values()]
    return cells[:1] + [
        f"{cell} ({ratio(taken, base):.2f})"
        for cell, taken in zip(cells[1:], list(times.values())[1:], strict=True)
    ]


def attend(rounds: int) -> None:
    """One layer: vLLM's kernel over its bfloat16 pages, ours over each kind."""
    torch.cpu._init_amx()
    best = ops.cpu_kernels()
    variants = [(best, _get_attn_isa(torch.bfloat16, PAGE, DIM))]
    if best == "amx":
        variants.append(("avx512", "vec"))
    for ours, theirs in variants:
        choose_isa(ours)
        rows = [
            [name_of(case), *compared(one_layer(case, theirs, rounds), "{:,.0f}".format)] for case in CASES
        ]
        table(f"One layer, kvloom {ours}, vLLM {theirs}", ["us", "vLLM bfloat16", *KINDS], rows)
    choose_isa(best)


def latents(rounds: int) -> None:
    """One layer of latent attention: vLLM's kernel over its bfloat16 pages, ours over each kind."""
    kinds = [f"kvloom {name}" for name in vllm_latents.KINDS]
    rows = [
        [name_of(case), *compared(vllm_latents.one_layer(case, rounds), "{:,.0f}".format)]
        for case in vllm_latents.CASES
    ]
    nbytes = vllm_latents.bytes_of_tokens().values()
    of_float = next(iter(nbytes))
    rows.append(["bytes of a token", f"{of_float:,}", *(f"{x:,} ({x / of_float:.2f})" for x in nbytes)])
    title = f"One layer of latent attention, kvloom {ops.cpu_kernels()}, vLLM CPU_MLA"
    table(title, ["us", "vLLM bfloat16", *kinds], rows)


def name_of(case: tuple[int, int, int]) -> str:
    sequences, new, stored = case
    return f"prompt of {new:,}" if new > 1 else f"{sequences} x {stored:,}"


def one_layer(case: tuple[int, int, int], isa: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each contender in each round, each time over memory that no cache holds."""
    sequences, new, stored = case
    count = -(-stored // PAGE)
    block_table = torch.randperm(sequences * count).int().view(sequences, -1)
    starts = torch.arange(sequences + 1, dtype=torch.int32) * new
    lengths = torch.full((sequences,), stored, dtype=torch.int32)
    step = VllmStep.of(starts, lengths, block_table, PAGE, num_tokens=sequences * new, max_length=stored)
    slots = step.batch.index.slots(
        torch.arange(sequences).repeat_interleave(stored), torch.arange(stored).repeat(sequences)
    )
    key, value = torch.randn(2, sequences * stored, HEADS, DIM).bfloat16()
    query = torch.randn(sequences * new, QUERY_HEADS, DIM).bfloat16()
    out = torch.empty_like(query)
    plan = kernels.cpu_attn_get_scheduler_metadata(
        num_reqs=sequences, num_heads=QUERY_HEADS, num_kv_heads=HEADS, head_dim=DIM, seq_lens=lengths,
        dtype=query.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1, isa=isa,
        enable_kv_split=True,
    )  # fmt: skip

    def theirs(keys: torch.Tensor, values: torch.Tensor) -> None:
        kernels.cpu_attention_with_kv_cache(
            query=query, key_cache=keys, value_cache=values, output=out, query_start_loc=starts,
            seq_lens=lengths, scale=DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=block_table, softcap=0.0, scheduler_metadata=plan, s_aux=None,
        )  # fmt: skip

    turns = 2 if new > 1 else turns_for(4 * sequences * stored * HEADS * DIM, rounds)
    calls: dict[str, list[Callable[[], object]]] = {"vLLM bfloat16": [], **{name: [] for name in KINDS}}
    for _ in range(turns):
        memory = torch.zeros(block_table.numel(), HEADS, 2 * PAGE, DIM, dtype=torch.bfloat16)
        halves = memory.chunk(2, dim=2)
        kernels.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)
        calls["vLLM bfloat16"].append(lambda halves=halves: theirs(*halves))
        for name, quant in KINDS.items():
            content = PageFormat.heads(DIM, torch.bfloat16, quant).content_bytes
            memory = torch.zeros(block_table.numel(), HEADS, PAGE, content, dtype=torch.uint8)
            kv = PageFormat.heads(DIM, torch.bfloat16, quant).view(memory)
            ops.store(key, value, slots, kv)
            calls[name].append(lambda kv=kv: ops.attend(query, kv, step.batch, out=out))
    return in_turn({name: timed(runs) for name, runs in calls.items()}, rounds, 2)


def timed(runs: list[Callable[[], object]]) -> Callable[[], float]:
    """Microseconds of the next of ``runs``."""
    turn = iter(range(10**9))

    def run() -> float:
        call = runs[next(turn) % len(runs)]
        start = time.thread_time()
        call()
        return (time.thread_time() - start) * 1e6

    return run


def engines(model: Path, names: list[str], **arguments: Any) -> dict[str, LLM]:
    """One of each kind in this process."""
    common = {"dtype": "bfloat16", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    return {name: LLM(model=str(model), **common, **arguments, **ENGINES[name]) for name in names}


def generate(rounds: int) -> None:
    """A step after 4,096 tokens, in a model of 4 layers."""
    context, new = 4096, 17
    with tempfile.TemporaryDirectory() as folder:
        found = engines(
            random_model(Path(folder)), list(ENGINES), max_model_len=context + 64, max_num_seqs=8,
            max_num_batched_tokens=4096,
        )  # fmt: skip
    rows = []
    for batch in (1, 8):
        numbers = random.Random(0)
        texts = [
            TokensPrompt(prompt_token_ids=numbers.choices(range(3, VOCABULARY), k=context))
            for _ in range(batch)
        ]

        def seconds(engine: LLM, count: int, texts: list[Any] = texts) -> float:
            parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            start = time.thread_time()
            engine.generate(texts, parameters, use_tqdm=False)
            return time.thread_time() - start

        def step(engine: LLM, seconds: Callable[..., float] = seconds) -> float:
            return (seconds(engine, new) - seconds(engine, 1)) / (new - 1) * 1e3

        calls = {name: lambda engine=engine, step=step: step(engine) for name, engine in found.items()}
        rows.append([f"{batch}", *compared(in_turn(calls, rounds, 1), "{:.1f}".format)])
    table("A step of 4 layers behind 4,096 tokens", ["ms, requests", *found], rows)
    blocks = [engine.llm_engine.vllm_config.cache_config.num_gpu_blocks for engine in found.values()]
    table("Blocks of 128 tokens in 1 GiB", [*found], [[f"{x} ({x / blocks[0]:.2f})" for x in blocks]])


def random_model(folder: Path) -> Path:
    """Llama of 4 layers with the heads of ``attend``, with the bundled tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=4,
        num_attention_heads=QUERY_HEADS, num_key_value_heads=HEADS, head_dim=DIM,
        max_position_embeddings=16384, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model_path() / name, folder / name)
    return folder


def prefix(rounds: int) -> None:
    """64 requests: 512 tokens shared, 16 of their own, 32 new ones; the bundled model."""
    names = [name for name in ENGINES if name != "vLLM fp8"]
    found = engines(bundled_model_path(), names, max_model_len=1024, max_num_seqs=64, block_size=32)
    parameters = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)

    def run(engine: LLM, numbers: random.Random) -> float:
        shared = numbers.choices(range(3, VOCABULARY), k=512)
        texts = [
            TokensPrompt(prompt_token_ids=shared + numbers.choices(range(3, VOCABULARY), k=16))
            for _ in range(64)
        ]
        start = time.thread_time()
        engine.generate(texts, parameters, use_tqdm=False)
        return time.thread_time() - start

    seeds = {name: random.Random(0) for name in found}
    calls = {name: lambda engine=e, name=name: run(engine, seeds[name]) for name, e in found.items()}
    table(
        "64 requests that share 512 tokens",
        ["s", *found],
        [["", *compared(in_turn(calls, rounds, 1), "{:.2f}".format)]],
    )


PROMPT, STORE_PAGE = 2048, 32
_ENGINES: list[LLM] = []
"""Engine of a process of ``store``."""


def store(rounds: int) -> None:
    """A prompt of 2,048 new tokens and one token after it, in a model of 4 layers: computed, and read."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model, shared = random_model(Path(folder) / "model"), f"{folder}/store"
        int8 = ENGINES["kvloom int8"]
        found = {
            "vLLM bfloat16": stack.enter_context(own_process(model, {})),
            "kvloom int8, which writes it": stack.enter_context(own_process(model, int8, shared)),
            "kvloom int8, which reads it": stack.enter_context(own_process(model, int8, shared)),
        }
        times: dict[str, list[float]] = {name: [] for name in found}
        numbers = random.Random(0)
        for turn in range(rounds + 2):
            text = numbers.choices(range(3, VOCABULARY), k=PROMPT)
            for name, process in found.items():
                taken, num_read = process.submit(first_token, text).result()
                if turn > 1:
                    times[name].append(taken * 1e3)
                expected = (PROMPT - 1) // STORE_PAGE * STORE_PAGE if name.endswith("reads it") else 0
                if num_read != expected:
                    raise SystemExit(f"{name}: {num_read} tokens read, expected {expected}")
                if name.endswith("writes it"):
                    time.sleep(3)  # it is written in the background, and listed every two seconds
        nbytes = sum(file.stat().st_size for file in Path(shared).rglob("*.safetensors")) / (rounds + 2)
    rows = [[f"{PROMPT:,} tokens", *compared(times, "{:.0f}".format), f"{nbytes / 2**20:.1f} MiB"]]
    table("Time to the first token, 4 layers, one thread", ["ms", *found, "in the store"], rows)


@contextmanager
def own_process(
    model: Path, kind: dict[str, Any], shared: str | None = None
) -> Iterator[ProcessPoolExecutor]:
    """A process with an engine, which may have a store."""
    options: dict[str, Any] = {"max_model_len": PROMPT + 64, "max_num_batched_tokens": PROMPT, **kind}
    options |= {"max_num_seqs": 1, "block_size": STORE_PAGE, "kv_cache_memory_bytes": 1 << 28}
    if shared:
        options["kv_transfer_config"] = {
            "kv_connector": "KvloomConnector",
            "kv_connector_module_path": "kvloom.integrations.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"store": shared},
        }
    with ProcessPoolExecutor(1, get_context("spawn"), start_engine, (str(model), options)) as process:
        yield process


def start_engine(model: str, options: dict[str, Any]) -> None:
    """The engine of this process, for ``first_token``."""
    torch.set_num_threads(1)
    _ENGINES[:] = [LLM(model=model, dtype="bfloat16", enforce_eager=True, **options)]


def first_token(text: list[int]) -> tuple[float, int]:
    """Seconds until a prompt has its first token, and how many of its tokens were not computed."""
    parameters = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (engine,) = _ENGINES
    start = time.perf_counter()
    (request,) = engine.generate([TokensPrompt(prompt_token_ids=text)], parameters, use_tqdm=False)
    return time.perf_counter() - start, request.num_cached_tokens or 0


GUESSED: Final = (0, 3, 5, 10)
"""Most drafted tokens of a request in a step of each of vLLM's engines; 0 for an engine without drafts."""


def drafts(rounds: int) -> None:
    """Tokens a second behind prompts of 160 tokens that the model copies, but for one in twenty."""
    new, rows = 160, []
    model: Any = session_drafts.random_model(1536, 18, torch.bfloat16)
    asked = {count: session_drafts.copying(model, True, count, new) for count in (1, 4)}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model.save_pretrained(folder)
        found = {
            f"vLLM, n-grams of {most}" if most else "vLLM": stack.enter_context(
                drafting_process(folder, most)
            )
            for most in GUESSED
        }
        for count, requests in asked.items():
            texts = [x.tokens for x in requests]
            calls: dict[str, Callable[[], float]] = {
                name: lambda process=process, texts=texts: process.submit(decoding_speed, texts, new).result()
                for name, process in found.items()
            }
            for name, way in (("kvloom session", None), ("kvloom session, drafts", "lookup")):
                calls[name] = lambda way=way, x=requests: session_drafts.in_session(model, way, x).speed
            times = in_turn(calls, min(rounds, 3), 1)
            best = max(found, key=lambda name: median(times[name]))
            ours = ratio(times["kvloom session, drafts"], times[best])
            rows.append([f"{count}", *compared(times, "{:.1f}".format), f"{ours:.2f}x {best}"])
    table("Tokens a second of text that copies", ["requests", *calls, "drafts over the best"], rows)


@contextmanager
def drafting_process(model: str, most: int) -> Iterator[ProcessPoolExecutor]:
    """A process with an engine that drafts ``most`` tokens: a second engine after one with drafts fails."""
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 28, "skip_tokenizer_init": True, "max_model_len": 1024,
        "max_num_seqs": 4, "enable_prefix_caching": False,
    }  # fmt: skip
    if most:
        looked = {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": most, **looked}
    with ProcessPoolExecutor(1, get_context("spawn"), start_engine, (model, options)) as process:
        yield process


def decoding_speed(texts: list[list[int]], new: int) -> float:
    """Tokens a second after the first ones of all texts."""
    prompts = [TokensPrompt(prompt_token_ids=x) for x in texts]
    (engine,) = _ENGINES

    def seconds(most: int) -> float:
        parameters = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        start = time.process_time()
        engine.generate(prompts, parameters, use_tqdm=False)
        return time.process_time() - start

    return len(texts) * (new - 1) / (seconds(new) - seconds(1))


def quality(rounds: int) -> None:
    """Distributions over prompts of 500 tokens of the bundled model; ``rounds`` is not read."""
    asked: list[tuple[str, dict[str, Any]]] = [("int8", {}), ("int8", {"smooth": "none"})]
    asked += [("int4", {}), ("int4", {"smooth": "none"}), ("int4", {"recent": 0})]
    kinds, rows = {}, []
    for kind, options in asked:
        name = " ".join([f"kvloom {kind}", *(f"{x} {y}" for x, y in options.items())])
        kinds[name] = {**ENGINES[f"kvloom {kind}"], "additional_config": {"kvloom": options}}
    with tempfile.TemporaryDirectory() as folder:
        for keys in ("plain", "outliers", "biases"):
            model = None if keys == "plain" else vllm_quality.changed(Path(folder, keys), keys)
            found = vllm_quality.differences(kinds, "float32", model)
            rows.append([f"{keys} keys: KL", *(f"{x.mean_kl:.1e}" for x in found.values())])
            rows.append(["same choices", *(f"{x.same:.1%}" for x in found.values())])
    table("Next tokens of 500-token prompts beside float pages, float32", ["", *kinds], rows)


SECTIONS = {
    "attend": attend,
    "latents": latents,
    "generate": generate,
    "prefix": prefix,
    "store": store,
    "drafts": drafts,
    "quality": quality,
}


def main() -> None:
    """Measure the sections that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    current_platform.import_kernels()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name in args.sections:
        SECTIONS[name](args.rounds)


if __name__ == "__main__":
    main()
