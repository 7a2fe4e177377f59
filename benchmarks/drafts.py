"""Prompt lookup in models with recurrent states over greedy decoding. Prints one JSON line.

The text is an edited copy: a model continues it by a permutation of its vocabulary, built into its
embeddings, and the prompt is what it will write, but for one token in twenty. All else of the weights is
random, and costs what it costs. Greedy decoding and lookup of 10 tokens alternate, each with a cache of its
own, in one thread.

Prediction: a step of 11 tokens takes two to four times one of a token, as weights are read once, and of
drafts that end at the next edit 6 tokens stay; what goes back is computed again in the layers with states
alone. So lookup takes half the time of greedy decoding, with the same tokens. Granite 4 computes several
tokens in chunks of 256, which transformers' own code fills with zeros: there a step takes many times one.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any, Final

import torch
from states import hybrid
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from kvloom import KVCache, enable
from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT

EDITS: Final = 20
"""Tokens of the prompt from one that is another to the next."""
LOOKUP: Final = 10


def qwen(hidden: int, layers: int) -> Any:
    """A random Qwen3-Next without experts, a quarter of whose layers attend."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        * (layers // 4),
        linear_num_value_heads=hidden // 64,
        linear_num_key_heads=hidden // 128,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=0,
        mlp_only_layers=list(range(layers)),
        eos_token_id=None,
    )
    return Qwen3NextForCausalLM(config).eval()


def in_chunks(hidden_size: int, layers: int) -> Any:
    """A Granite that computes several tokens in chunks of 32."""
    model = hybrid(hidden_size, layers)
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 32
    return model


def continued(model: Any, num_tokens: int) -> Tensor:
    """Let a model continue a text by a permutation, and return a text that it would write."""
    weight = model.get_input_embeddings().weight.data
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(1))
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.empty_like(weight))
    weight.copy_(torch.randn_like(weight))
    model.get_output_embeddings().weight.data[order.roll(-1)] = weight[order]  # the one after it
    return order[:num_tokens]


def edited(text: Tensor, draw: random.Random) -> Tensor:
    """``text`` with some other tokens in it."""
    text = text.clone()
    for at in range(draw.randrange(EDITS), len(text), EDITS):
        text[at] = draw.randrange(3, 4096)
    return text


def times(model: Any, kv: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of both, and what drafts had."""
    text = continued(model, num_tokens + 1)
    prompt = torch.cat([edited(text[1:], random.Random(0)), text[:1]])[None]
    enable(model, kv=kv)
    options: dict[str, Any] = {
        "max_new_tokens": num_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(prompt),
    }
    ways = {"greedy": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP}}
    steps, found, tokens = [0], {name: list[float]() for name in ways}, []
    model.model.register_forward_pre_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    count = {}
    for turn in range(rounds + 1):  # the first one warms up
        for name, lookup in ways.items():
            cache, steps[0] = KVCache.for_model(model, kv), 0
            start = time.perf_counter()
            tokens.append(model.generate(prompt, **options, **lookup, **{CACHE_ARGUMENT: cache}))
            if turn:
                found[name].append(time.perf_counter() - start)
            count[name] = steps[0]
    if any(not torch.equal(x, tokens[0]) for x in tokens):
        raise RuntimeError("prompt lookup must give the tokens of greedy decoding")
    if not torch.equal(tokens[0][0, num_tokens + 1 :], text[1:]):
        raise RuntimeError("the text must be continued by the permutation")
    ratios = [a / b for a, b in zip(found["greedy"], found["lookup"], strict=True)]
    return {
        "greedy_over_lookup": statistics.median(ratios),
        "seconds": {name: statistics.median(x) for name, x in found.items()},
        "forwards": count,
        "new_tokens": num_tokens,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"figure": "drafts"}
    for name, make in {"qwen3_next": qwen, "granite": hybrid, "granite, chunks of 32": in_chunks}.items():
        for kv in ("auto", "int8"):
            model = make(arguments.hidden, arguments.layers)
            result[f"{name} {kv}"] = times(model, kv, arguments.tokens, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
