"""Sessions with drafts over those without, in tokens a second of decoding. Prints one JSON line.

A random model continues a text by a permutation of its vocabulary, built into its embeddings. Texts that copy
have prompts with what the model will write, but for one token in twenty; others have prompts of other tokens.
The layers are random, and cost what they cost. Objects of a schema are written by the bundled model, made as
large by heads and layers that add nothing. All contenders alternate, on the same model, and must give the
same tokens. In one thread, seconds are those of the processor.

Prediction, written before the first run: in bfloat16, packed, a step of 16 rows takes 1.5 to 2 times one
of one row. Drafts end at the next edit, so that about 8 of 15 tokens hold on average, and an edit is
found again after three tokens. One request that copies is 2.5 to 3 times as fast, four 1.8 to 2.2 times;
in float32, where rows cost more, 2 and 1.5 times. Where nothing is copied, looking up takes 10
microseconds a token, which no step of 10 ms shows: 0.98 to 1.0.

``--assistant`` adds a row in which a smaller random model drafts, which goes on by the same permutation but
for the tokens that it does not know. Prediction, written before the first run: it takes a tenth of a step
for each drafted token, and knows nine tokens of ten, so that drafts of 4 to 6 tokens are right about half
of the time: other text of one request is 1.7 to 2.2 times as fast, of four 1.3 to 1.7 times, since rows of
four drafts cost more. An assistant that knows no token is asked no more after a few: 0.97 to 1.0.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from drafts import LOOKUP, continued, edited
from transformers import (
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StoppingCriteria,
)

from kvloom.integrations.transformers import continuous_batching, disable, enable
from kvloom.integrations.transformers.session.choices.sampling import Choice, choose_by_request
from kvloom.integrations.transformers.session.requests.prompt import CHOICE
from kvloom.models import bundled_model_path
from kvloom.serving.protocol.structured import Grammar, Grammars, Structure

WITHOUT, DRAFTS, STOCK = "session", "session, drafts", "transformers' lookup"
GENERATE, LOOKED_UP = "enabled generate", "enabled generate, lookup"
KEYS: Final = (
    "identifier_of_the_customer",
    "number_of_items_in_the_order",
    "is_paid_by_invoice",
    "was_delivered_to_the_neighbor",
    "days_between_order_and_delivery",
)
SCHEMA: Final = {
    "type": "object",
    "properties": {
        key: {"type": "boolean"} if key[:3] in ("is_", "was") else {"type": "integer", "maximum": 99999}
        for key in KEYS
    },
    "required": [*KEYS],
    "additionalProperties": False,
}


class Request(NamedTuple):
    """A request of a session.

    Attributes:
        tokens: Its prompt.
        most: Largest number of new tokens.
        choice: Makes its ``Choice``; ``None`` for greedy tokens.
    """

    tokens: list[int]
    most: int
    choice: Callable[[], Choice] | None = None


class Decoded(NamedTuple):
    """What a contender did: tokens of each request, tokens a second of decoding, and a session's report."""

    tokens: list[list[int]]
    speed: float
    report: Any = None


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


@torch.no_grad()
def grown_model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    """The bundled model with the sizes of another one: what is added has random weights, and adds nothing."""
    small: Any = LlamaForCausalLM.from_pretrained(bundled_model_path(), dtype=torch.float32)
    config = LlamaConfig(
        **{
            **small.config.to_dict(),
            "hidden_size": hidden,
            "intermediate_size": 8 * hidden // 3 // 64 * 64,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 128,
            "tie_word_embeddings": False,
        }
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    own, narrow = model.state_dict(), small.state_dict()
    for name, weight in own.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "norm" in name or "embed" in name:
            weight.zero_()  # nothing is added to what the bundled model has
        if name in narrow:
            there = narrow[name]
            weight[tuple(slice(size) for size in there.shape)] = there
            if there.ndim == 2 and not name.startswith("lm_head"):
                weight[: there.shape[0], there.shape[1] :] = 0
        if "norm" in name:  # the mean of squares is over more elements
            weight *= (small.config.hidden_size / hidden) ** 0.5
    return model.to(dtype)


def copying(model: Any, copies: bool, count: int, num_tokens: int) -> list[Request]:
    """Prompts that end with the token from which the model goes on."""
    order, found = continued(model, 4096), []
    for number in range(count):
        begin = number * 29 % (len(order) - num_tokens - 1)
        text = order[begin : begin + num_tokens + 1]
        draw = random.Random(number)
        other = torch.tensor([draw.randrange(3, 4096) for _ in range(num_tokens)])
        tokens = torch.cat([edited(text[1:], draw) if copies else other, text[:1]]).tolist()
        found.append(Request(tokens, num_tokens))
    return found


def objects(model: Any, count: int) -> list[Request]:
    """Objects of a schema with long keys."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    ends = [model.config.eos_token_id]
    wanted = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    structure: Any = Structure.of({"response_format": wanted})
    matcher = Grammars(tokenizer, ends, model.config.vocab_size).matcher(structure)
    found = []
    for number in range(count):
        tokens = tokenizer(f"ORDER_{number} = ")["input_ids"]

        def choice(size: int = len(tokens)) -> Choice:
            return Choice(processors=(Grammar(structure, matcher.deep_copy(), size, ends),))

        found.append(Request(tokens, 256, choice))
    return found


@torch.inference_mode()
def in_session(model: Any, drafts: Any, requests: Sequence[Request]) -> Decoded:
    """A session's tokens, and its speed after the first token of the last request."""
    continuous_batching(model, drafts=drafts, share=False, pack=True)
    ends = model.config.eos_token_id if requests[0].choice else None
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1 if ends is None else ends, pad_token_id=0),
        ContinuousBatchingConfig(page_size=16, num_blocks=8192, max_batch_tokens=2048),
    )
    choose_by_request(manager)
    processor = manager.batch_processor = manager._create_batch_processor()
    names = [
        manager.add_request(x.tokens, max_new_tokens=x.most, **({CHOICE: x.choice()} if x.choice else {}))
        for x in requests
    ]

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
    return Decoded(tokens, (sum(map(len, tokens)) - done) / took, report)


class Begin(StoppingCriteria):
    """Notes when the first tokens of a batch are there; stops nothing."""

    seconds, length = 0.0, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.length:
            self.seconds, self.length = clock(), input_ids.shape[1]
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generated(model: Any, is_enabled: bool, looks_up: bool, requests: Sequence[Request]) -> Decoded:
    """Tokens of ``generate``, and its speed after the first token of each row."""
    continuous_batching(model, None)
    if is_enabled:
        enable(model, pack=True, batch_invariant=True)
    else:
        disable(model)
    batch, begin = torch.tensor([x.tokens for x in requests]), Begin()
    text = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        stopping_criteria=[begin],
        max_new_tokens=requests[0].most,
        do_sample=False,
        pad_token_id=0,
        prompt_lookup_num_tokens=LOOKUP if looks_up else None,
    )
    disable(model)
    speed = len(batch) * (text.shape[1] - begin.length) / (clock() - begin.seconds)
    return Decoded(text[:, batch.shape[1] :].tolist(), speed)


def clock() -> float:
    """Seconds of the processor in one thread, of a clock in several."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def active(processor: Any, names: list[str]) -> list[Any]:
    """States of requests; an empty one of each that has not begun."""
    states = processor.scheduler.active_requests
    empty = SimpleNamespace(generated_tokens=[])
    return [states.get(name, empty) for name in names]


def assistant_of(model: Any, hidden: int, layers: int, known: float) -> Any:
    """A smaller model that goes on as ``model`` does behind a share of the tokens."""
    assistant = random_model(hidden, layers, model.dtype)
    order = continued(assistant, 4096)
    head, draw = assistant.get_output_embeddings().weight.data, torch.Generator().manual_seed(2)
    unknown = torch.nonzero(torch.rand(4096, generator=draw) >= known)[:, 0]
    following = order.roll(-1)[unknown]
    head[following.roll(1)] = head[following].clone()
    return assistant


def compared(
    model: Any,
    requests: Sequence[Request],
    rounds: int,
    with_generate: bool,
    with_stock: bool,
    assistants: dict[str, Any],
) -> dict[str, Any]:
    """Speeds of all contenders as multiples of a session without drafts, and what drafts had."""
    contenders: dict[str, Callable[[], Decoded]] = {
        WITHOUT: lambda: in_session(model, None, requests),
        DRAFTS: lambda: in_session(model, "lookup", requests),
    }
    for name, assistant in assistants.items():
        contenders[name] = lambda assistant=assistant: in_session(model, assistant, requests)
    if with_stock:
        contenders[STOCK] = lambda: generated(model, False, True, requests)
    if with_generate:
        contenders[GENERATE] = lambda: generated(model, True, False, requests)
        contenders[LOOKED_UP] = lambda: generated(model, True, True, requests)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    expected = report = None
    for turn in range(rounds + 1):  # the first one warms up
        for name in [*contenders][:: 1 if turn % 2 else -1]:
            found = contenders[name]()
            expected = found.tokens if expected is None else expected
            if found.tokens != expected and name != STOCK:  # whose steps of several tokens round otherwise
                raise RuntimeError("drafts must not change tokens")
            report = found.report if name == DRAFTS else report
            if turn:
                speeds[name].append(found.speed)
    over = {
        name: statistics.median(x / y for x, y in zip(taken, speeds[WITHOUT], strict=True))
        for name, taken in speeds.items()
    }
    return {
        "requests": len(requests),
        "tokens": sum(map(len, expected or ())),
        "speeds": {name: statistics.median(x) for name, x in speeds.items()},
        "over": over,
        "drafted": report.tokens_drafted,
        "accepted": report.tokens_accepted,
        "steps": report.steps,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument(
        "--tokens", type=int, default=160, help="a quarter of them with more than 16 requests"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--texts", nargs="+", default=["copies", "other", "json"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--assistant", type=float, nargs="*", default=[], help="shares of tokens it knows")
    parser.add_argument("--assistant-hidden", type=int, default=512)
    parser.add_argument("--assistant-layers", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for dtype in arguments.dtypes:
        sizes = arguments.hidden, arguments.layers, getattr(torch, dtype)
        for text in arguments.texts:
            model = grown_model(*sizes) if text == "json" else random_model(*sizes)
            for count in arguments.counts if text != "json" else arguments.counts[:1]:
                num_tokens = arguments.tokens // (4 if count > 16 else 1)
                if text == "json":
                    requests = objects(model, count)
                else:
                    requests = copying(model, text == "copies", count, num_tokens)
                rounds = arguments.rounds if count <= 16 else 1
                with_generate = count <= 16 and text != "json"
                with_stock = count == 1 and with_generate
                assistants = {}
                if text != "json":
                    size = arguments.assistant_hidden, arguments.assistant_layers
                    assistants = {
                        f"an assistant that knows {known:.0%}": assistant_of(model, *size, known)
                        for known in arguments.assistant
                    }
                row = {
                    "dtype": dtype,
                    "text": text,
                    **compared(model, requests, rounds, with_generate, with_stock, assistants),
                }
                print(row, flush=True)
                rows.append(row)
            del model
    parameters = sum(x.numel() for x in random_model(*sizes[:2], torch.bfloat16).parameters())
    sizes_of_all = {"parameters": parameters, "rounds": arguments.rounds, "lookup": LOOKUP}
    print(json.dumps({"figure": "session_drafts", **sizes_of_all, "rows": rows}))


if __name__ == "__main__":
    main()
