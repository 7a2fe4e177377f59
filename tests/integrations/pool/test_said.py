"""What a pool and its caches say of themselves."""

from __future__ import annotations

import torch
from oracles.language_models import make_model

from kvloom.integrations.transformers import KVPool
from kvloom.integrations.transformers.session import BatchReport


def test_a_pool_says_what_it_holds_and_found() -> None:
    model, ids = make_model("kvloom"), torch.arange(3, 43)[None]
    with KVPool.for_model(model, "int8", max_tokens=256) as pool, torch.no_grad():
        for _ in range(2):
            cache = pool.begin(ids)
            model(ids[:, int(cache.get_seq_length()) :], past_key_values=cache, use_cache=True)
            pool.commit(cache, ids)
        found = pool.report()
        for shown in (pool, cache):
            assert shown._repr_html_() == shown.report()._repr_html_()
        said = (
            f"{found['active']} pages held of {found['num_pages']}, {found['tokens_found']} tokens found of "
        )
        assert repr(pool) == f"KVPool(kv={found['kv']!r}, {said}{found['tokens_asked']})"
        assert found["tokens_found"] > 0 and found["nbytes"] >= 256 * found["nbytes_per_token"] > 0
        assert f"bytes {found['nbytes']:,}" in " ".join(str(found).split())


def test_a_report_of_a_session_is_a_table() -> None:
    report = BatchReport("int8:g64", 16, tokens_found=1234)
    assert "tokens found" in str(report) and "1,234" in str(report)
    assert "<td>1,234</td>" in report._repr_html_()
