"""``kvloom generate`` and ``demo``: continue a text. Imports no torch before it runs."""

import sys
import time
from pathlib import Path
from typing import Any, Final

from kvloom.errors import ArgumentError
from kvloom.store.backends import store_url

_PAGE_SIZE: Final = 16


def write(
    model: Any,
    tokenizer: Any,
    prompt: str,
    kv: str,
    max_new_tokens: int,
    num_lines_shown: int | None = None,
    store: str | None = None,
    view: Path | None = None,
) -> None:
    """Print the prompt (or its last lines) and its greedy continuation token by token, then its costs.

    Args:
        model: Model, as ``load_model`` returns it.
        tokenizer: Tokenizer, as ``load_model`` returns it.
        prompt: Text.
        kv: As of ``KVCache.for_model``.
        max_new_tokens: Maximum number of new tokens, within the model's positions.
        num_lines_shown: Number of last lines of the prompt to print; ``None`` for all.
        store: Folder or URL of a store of computed pages.
        view: HTML file to write, which shows the pages of the store's pool.

    Raises:
        ArgumentError: the prompt has no token, or too many; or the model is not supported.
    """
    from kvloom.integrations.transformers import KVCache, Streamer
    from kvloom.integrations.transformers.models.cache_argument import CACHE_ARGUMENT
    from kvloom.integrations.transformers.models.positions import room_behind

    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    if inputs.input_ids.shape[1] == 0:
        raise ArgumentError("--prompt must have at least one token, got an empty text")
    num_embeddings = model.get_input_embeddings().num_embeddings
    if (largest := int(inputs.input_ids.max())) >= num_embeddings:
        raise ArgumentError(
            f"model must have an embedding for each token of its tokenizer, got token {largest} and "
            f"{num_embeddings} embeddings"
        )
    settings = model.generation_config
    settings.cache_implementation = None  # kvloom's cache is used
    if (num_beams := settings.num_beams or 1) > 1:
        raise ArgumentError(f"model must have num_beams 1 in its generation_config.json, got {num_beams}")

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    num_tokens, wanted = inputs.input_ids.shape[1], max_new_tokens
    max_new_tokens = room_behind("--prompt", model, num_tokens, wanted)
    pool = None if store is None else _pool_over(store, model, kv, num_tokens + max_new_tokens)
    if pool is not None and view is not None:
        pool.record()
    start = time.perf_counter()
    cache = KVCache.for_model(model, kv=kv) if pool is None else pool.begin(inputs.input_ids)
    num_read, reading = int(cache.get_seq_length()), time.perf_counter() - start
    show(prompt if num_lines_shown is None else "\n".join(["...", *prompt.splitlines()[-num_lines_shown:]]))
    start = time.perf_counter()
    out = model.generate(
        **inputs,
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=False,
        streamer=Streamer(tokenizer, show),
    )
    seconds = time.perf_counter() - start
    num_new = out.shape[1] - num_tokens
    show("\n")
    sys.stderr.write(
        f"[{num_new} tokens in {seconds:.2f} s, {num_new / seconds:.1f} tokens/s; {kv} cache: "
        f"{cache.nbytes_per_token:,.0f} bytes/token, {cache.nbytes:,} bytes allocated, where a "
        f"DynamicCache has {cache.report()['nbytes_dynamic']:,}]\n"
    )
    if num_new == max_new_tokens < wanted:
        sys.stderr.write(f"[the text ends here: the model has {num_tokens + num_new} positions]\n")
    if pool is not None:
        pool.commit(cache, out)
        pool.close()
        if view is not None:
            pool.view(view, tokenizer.decode)
        said = pool.report()["store"]
        computing = num_read * said["seconds_per_token"]
        sys.stderr.write(
            f"[{num_read} of {num_tokens} prompt tokens read from {store} in {1e3 * reading:.1f} ms, "
            f"computing them takes about {1e3 * computing:.0f} ms]\n"
            if num_read
            else f"[no prompt tokens were read from {store}, {_next_time(str(store), num_tokens, said)}]\n"
        )


def _next_time(store: str, num_tokens: int, said: dict[str, Any]) -> str:
    """What the next run finds of a prompt of which nothing was read, according to the store's report."""
    if num_tokens <= _PAGE_SIZE:  # the last token is always computed
        return f"which stores whole pages of {_PAGE_SIZE} tokens, without the last token"
    if store_url(store).startswith("memory:"):
        return "whose pages end with this process"
    is_written = any(tier.get("runs_written") for tier in said["stores"].values())
    return "the next run reads them from there" if is_written else "and none were written to it"


def _pool_over(store: str, model: Any, kv: str, num_tokens: int) -> Any:
    """Make a pool for one sequence, above a store, by folder or URL."""
    from kvloom.integrations.transformers import KVPool

    max_tokens = num_tokens + _PAGE_SIZE
    return KVPool.for_model(model, kv=kv, page_size=_PAGE_SIZE, max_tokens=max_tokens, store=store_url(store))
