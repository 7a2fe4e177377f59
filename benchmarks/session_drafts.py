"""Sessions with drafts over those without, in tokens a second of decoding. Prints one JSON line.

A random model continues a text by a permutation of its vocabulary, built into its embeddings. Texts that copy
have prompts with what the model will write, but for one token in twenty; others have prompts of other tokens.
The layers are random, and cost what they cost. Both sessions alternate, on the same model, and must give
the same tokens. In one thread, seconds are those of the processor.

Prediction, written before the first run: in bfloat16, packed, a step of 16 rows takes 1.5 to 2 times one
of one row. Drafts end at the next edit, so that about 8 of 15 tokens hold on average, and an edit is
found again after three tokens. One request that copies is 2.5 to 3 times as fast, four 1.8 to 2.2 times;
in float32, where rows cost more, 2 and 1.5 times. Where nothing is copied, looking up takes 10
microseconds a token, which no step of 10 ms shows: 0.98 to 1.0.

With ``--generate`` the same of ``generate`` on an enabled model: batches of several rows with prompt lookup
over those without, and one row, where the session with drafts is also compared with transformers' own
``generate`` with prompt lookup, on its own cache and layers.

Prediction for these, written before the first run, without AMX: four rows 1.4 times, since all rows take the
width of the longest drafts, sixteen 1.0 to 1.1, where a step of 16 tokens is bound by arithmetic. The session
takes 0.7 of the time of transformers' own lookup for one row, whose drafts are always of ten tokens.
"""

import argparse
import json
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any, Final

import torch
from drafts import continued, edited
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
)

from kvloom.integrations.transformers import continuous_batching, disable, enable

TEXTS: Final = ("copies", "other")
LOOKUP: Final = {"prompt_lookup_num_tokens": 10}


def clock() -> float:
    """Seconds, of the processor in one thread."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def random_model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    """A random Llama whose head is its own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=8 * hidden // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=8192,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def prompts(order: Any, kind: str, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts that end with the token from which the model goes on."""
    texts = []
    for number in range(count):
        begin = number * 29 % (len(order) - num_tokens - 1)
        text = order[begin : begin + num_tokens + 1]
        draw = random.Random(number)
        other = torch.tensor([draw.randrange(3, 4096) for _ in range(num_tokens)])
        texts.append(torch.cat([edited(text[1:], draw) if kind == "copies" else other, text[:1]]).tolist())
    return texts


@torch.inference_mode()
def decoded(model: Any, requests: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]], Any]:
    """Tokens a second after the first token of the last request, tokens, and the report of a session."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
        ContinuousBatchingConfig(page_size=16, num_blocks=8192, max_batch_tokens=2048),
    )
    processor = manager.batch_processor = manager._create_batch_processor()
    names = [manager.add_request(request) for request in requests]

    def step() -> bool:
        is_busy = processor.prepare_next_batch()
        if is_busy:
            manager._generation_step()
            processor.update_batch()
        return bool(is_busy)

    while not all(x.generated_tokens for x in active(processor, names)):
        step()
    done = sum(len(x.generated_tokens) for x in active(processor, names))
    start = clock()
    while step():
        pass
    took = clock() - start
    outputs = manager.output_router.output_queue
    found = {x.request_id: x for x in (outputs.get() for _ in range(outputs.qsize()))}
    report = manager.report()
    manager.model.set_attn_implementation(manager._original_attn_impl)
    manager.release()
    tokens = [found[name].generated_tokens for name in names]
    return (sum(map(len, tokens)) - done) / took, tokens, report


def active(processor: Any, names: list[str]) -> list[Any]:
    """States of requests; an empty one of each that has not begun."""
    states = processor.scheduler.active_requests
    empty = SimpleNamespace(generated_tokens=[])
    return [states.get(name, empty) for name in names]


def ratio(model: Any, how: dict[str, Any], requests: list[list[int]], num_tokens: int, rounds: int) -> Any:
    """Tokens a second with drafts over those without, and what drafts had."""
    found, tokens, reports = [], [], []
    for turn in range(rounds + 1):  # the first one warms up
        speeds = []
        for drafts in (None, "lookup")[:: 1 if turn % 2 else -1]:
            continuous_batching(model, drafts=drafts, share=False, **how)
            speed, texts, report = decoded(model, requests, num_tokens)
            speeds.append((drafts is not None, speed))
            tokens.append(texts)
            reports.append(report)
        without, with_them = (x for _, x in sorted(speeds))
        if turn:
            found.append((with_them / without, without))
    if any(x != tokens[0] for x in tokens):
        raise RuntimeError("drafts must not change tokens")
    drafted = reports[-1] if reports[-1].tokens_drafted else reports[-2]
    return {
        "over_without": round(statistics.median(x for x, _ in found), 3),
        "tokens_a_second_without": round(statistics.median(x for _, x in found), 1),
        "accepted": drafted.tokens_accepted,
        "drafted": drafted.tokens_drafted,
        "steps": drafted.steps,
    }


class Begin(StoppingCriteria):
    """Notes when the first tokens of a batch are there; stops nothing."""

    seconds, length = 0.0, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.length:
            self.seconds, self.length = clock(), input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generated(
    model: Any, requests: list[list[int]], num_tokens: int, **lookup: int
) -> tuple[float, list[list[int]]]:
    """Tokens a second after the first token of each row, and tokens, of ``generate``."""
    batch, begin = torch.tensor(requests), Begin()
    options = {"max_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0, **lookup}
    text = model.generate(batch, attention_mask=torch.ones_like(batch), stopping_criteria=[begin], **options)
    speed = len(batch) * (text.shape[1] - begin.length) / (clock() - begin.seconds)
    return speed, text[:, batch.shape[1] :].tolist()


def ratios(model: Any, requests: list[list[int]], num_tokens: int, rounds: int) -> dict[str, float]:
    """Tokens a second of each way of ``generate``, and of one row of other ways, medians of rounds."""

    def session(drafts: str | None) -> tuple[float, list[list[int]]]:
        disable(model)
        continuous_batching(model, drafts=drafts, share=False, pack=True)
        found = decoded(model, requests, num_tokens)[:2]
        continuous_batching(model, kv=None)
        return found

    def own(**lookup: int) -> tuple[float, list[list[int]]]:
        enable(model, pack=True)
        return generated(model, requests, num_tokens, **lookup)

    def theirs(**lookup: int) -> tuple[float, list[list[int]]]:
        disable(model)
        return generated(model, requests, num_tokens, **lookup)

    ways: dict[str, Any] = {"generate": own, "generate with lookup": lambda: own(**LOOKUP)}
    if len(requests) == 1:
        ways["session"] = lambda: session(None)
        ways["session with drafts"] = lambda: session("lookup")
        ways["transformers"] = theirs
        ways["transformers with lookup"] = lambda: theirs(**LOOKUP)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first one warms up
        texts = {}
        for name, way in ways.items():
            speed, texts[name] = way()
            if turn:
                found[name].append(speed)
        if any(text != texts["generate"] for name, text in texts.items()):
            raise RuntimeError(f"all must give the same tokens, got {texts}")
    return {name: round(statistics.median(speeds), 1) for name, speeds in found.items()}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--generate", action="store_true", help="measure generate of batches")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {"figure": "session_drafts"}
    for dtype in arguments.dtypes:
        model = random_model(arguments.hidden, arguments.layers, getattr(torch, dtype))
        order = continued(model, 4096)
        for count in arguments.counts:
            for kind in TEXTS:
                requests = prompts(order, kind, count, arguments.tokens)
                if arguments.generate:
                    own = ratios(model, requests, arguments.tokens, arguments.rounds)
                else:
                    own = ratio(model, {"pack": True}, requests, arguments.tokens, arguments.rounds)
                result[f"{dtype} packed, {count} requests, text {kind}"] = own
                print(dtype, count, kind, own, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
