"""The first token of a long conversation in a session of a new process, with a store. Prints one JSON line.

A process computes a prompt in a session and answers it; a second one, with the same weights, is asked for the
next turn: once without a store and once with it. The store is a folder whose files the system may have in
memory. Seconds are from the request to its first new token; the model is made and looked at before.

Prediction: computing takes time in the square of the tokens, reading is a copy with checksums, at 1 to 2
GB/s: 6 KB a token are 0.1 to 0.2 s for 30,000 tokens, and computing them takes a minute, so 0.3 %.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from kvloom.integrations.transformers import continuous_batching
from kvloom.store import KVStore

NEW = 8
TURN = 20
"""Tokens of the next turn."""


def make_model() -> Any:
    """A Llama of six layers with grouped heads, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 16,
    )
    return LlamaForCausalLM(config).eval()


def ask(manager: Any, prompt: list[int], **options: Any) -> tuple[float, list[int]]:
    """Seconds to the first new token of a request, and all of its new tokens."""
    began, seconds, tokens = time.perf_counter(), 0.0, list[int]()
    name = manager.add_request(prompt, streaming=True, **options)
    for output in manager.request_id_iter(name):
        seconds = seconds or time.perf_counter() - began
        tokens = output.generated_tokens
        if output.is_finished():
            break
    return seconds, tokens


def first_token(prompt: list[int], url: str | None, kv: str) -> dict[str, Any]:
    """Seconds until it, its text, and how many tokens of the prompt were found."""
    model = make_model()
    store = None if url is None else KVStore(url)
    continuous_batching(model, kv, store=store)
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=len(prompt) // 16 + 64, max_batch_tokens=2048)
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        manager.add_request(prompt[:32], max_new_tokens=2)  # threads and pages are made
        manager.get_result()
        seconds, tokens = ask(manager, prompt)
        found = manager.report().tokens_found
    nbytes = sum(f.stat().st_size for f in Path(url[7:]).rglob("*") if f.is_file()) if url else 0
    continuous_batching(model, None)
    if store is not None:
        store.close(None)
    return {"seconds": seconds, "tokens": tokens, "found": found, "nbytes": nbytes}


def in_a_process(prompt: list[int], url: str | None, kv: str) -> dict[str, Any]:
    """``first_token`` in a new one."""
    command = [sys.executable, __file__, "--kv", kv, *(["--url", url] if url else [])]
    done = subprocess.run(command, input=json.dumps(prompt), stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(num_tokens: int, kv: str) -> dict[str, Any]:
    """Seconds of the second turn without a store and with it."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(3, 4096, (num_tokens + TURN,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        answer = in_a_process(text[:num_tokens], url, kv)["tokens"]
        turn = text[:num_tokens] + answer + text[num_tokens:]
        cold, warm = in_a_process(turn, None, kv), in_a_process(turn, url, kv)
    return {
        "tokens": len(turn),
        "kv": kv,
        "cold": cold["seconds"],
        "warm": warm["seconds"],
        "share": warm["seconds"] / cold["seconds"],
        "found": warm["found"],
        "same": cold["tokens"] == warm["tokens"],
        "megabytes": warm["nbytes"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--kv", nargs="+", default=["auto", "int8"])
    parser.add_argument("--url", help="of the store of one process, whose prompt is read as JSON")
    args = parser.parse_args()
    if not sys.stdin.isatty() and (given := sys.stdin.read().strip()):
        print(json.dumps(first_token(json.loads(given), args.url, args.kv[0])))
        return
    print(json.dumps({"figure": "restart", "rows": [compare(args.tokens, kv) for kv in args.kv]}))


if __name__ == "__main__":
    main()
