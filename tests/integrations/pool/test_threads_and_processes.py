"""Caches that share nothing belong to any thread; a forked child computes with one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from oracles.language_models import make_model, make_prompts

from kvloom.integrations.transformers import KVCache, KVPool

NEW = 12


def continued(model: Any, number: int, cache: Any) -> Any:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(**make_prompts([9, 14 + number % 3], seed=number), past_key_values=cache, **options)


@pytest.mark.parametrize("kv", ["auto", "int8:g16"])
def test_two_threads_may_use_two_caches(kv: str) -> None:
    model = make_model("kvloom")
    expected = [continued(model, i, KVCache.for_model(model, kv)) for i in range(12)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda i: continued(model, i, KVCache.for_model(model, kv)), range(12))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_models", [1, 2])
def test_two_threads_may_use_two_pools(num_models: int) -> None:
    """Of two models, or of one."""
    models = [make_model("kvloom") for _ in range(num_models)] * 2
    texts = [torch.arange(3 + i, 43 + i)[None] for i in range(3)]

    def ask(number: int) -> list[Any]:
        model, seen = models[number], list[Any]()
        pool = KVPool.for_model(model, max_tokens=4096)
        for ids in texts * 4:
            cache = pool.begin(ids)
            seen.append(cache.get_seq_length())
            out = model.generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False)
            pool.commit(cache, out)
            seen.append(out.tolist())
        pool.check()
        return seen

    expected = ask(0)
    assert expected[0] == 0 < expected[6]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(ask, range(2))] == [expected] * 2


FORKED = """
import os, torch
from integrations.pool.test_threads_and_processes import continued
from kvloom.integrations.transformers import KVCache
from oracles.language_models import make_model
torch.set_num_threads(2)
model = make_model("kvloom")
square = torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # in parallel
tokens = continued(model, 0, KVCache.for_model(model, "int8:g16"))
child = os.fork()
if not child:
    torch.set_num_threads(1)
    os._exit(not torch.equal(continued(model, 0, KVCache.for_model(model, "int8:g16")), tokens))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_child_that_is_forked_after_parallel_work_computes_with_one_thread() -> None:
    """With several it hangs, in torch alone as well: docs/saving.md says what to do."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
