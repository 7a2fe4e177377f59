"""Exporters of transformers and models that are enabled."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from oracles.language_models import make_model

from kvloom.errors import UnsupportedError
from kvloom.integrations.transformers import disable, enable


def has_exporters() -> bool:
    """Whether this version of transformers has exporters that are called as here."""
    name = "transformers.exporters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what an older one imports
        return find_spec(name) is not None and "ExportedModel" in dir(import_module(name))


pytestmark = pytest.mark.skipif(
    not has_exporters(), reason="this version of transformers has no such exporters"
)


def inputs(**options: Any) -> dict[str, Any]:
    ids = torch.arange(12)[None] * 7 % 96 + 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}


def exported(model: Any, **options: Any) -> Any:
    from transformers.exporters import DynamoConfig, DynamoExporter

    return DynamoExporter().export(model, inputs(**options), DynamoConfig()).program


@pytest.fixture
def model() -> Any:
    model = make_model(num_layers=1)
    enable(model)
    return model


def test_a_graph_with_a_cache_is_refused_until_the_model_is_disabled(model: Any) -> None:
    expected = model(**inputs()).logits
    with pytest.raises(UnsupportedError, match=r"disable\(model\) before the export"):
        exported(model)
    torch.testing.assert_close(model(**inputs()).logits, expected)  # still enabled
    disable(model)
    graph = exported(model).module()
    torch.testing.assert_close(graph(**inputs()).logits, expected)


def test_a_graph_without_a_cache_has_the_attention_of_kvloom(model: Any) -> None:
    program = exported(model, use_cache=False)
    assert any("kvloom" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(**inputs()).logits, model(**inputs()).logits)


def test_a_cache_that_generate_made_is_in_no_graph(model: Any) -> None:
    from transformers.exporters import DynamoConfig, DynamoExporter

    with pytest.raises(RuntimeError, match="prefill"):
        DynamoExporter().export_for_generation(model, inputs(), DynamoConfig())
