"""What a plan for a memory says in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from integrations.models.test_families import family

import kvloom
from kvloom.cli import main
from kvloom.planning.model import ModelShape
from kvloom.planning.verdict import verdict


def test_the_verdict_names_what_fits() -> None:
    shape = ModelShape.of(family("Llama").config, weights=10 * 10**9)
    plans = [kvloom.plan(shape, kv, context=10**8) for kv in ("float32", "int8:g8")]
    assert [round(x.total / 1e9, 1) for x in plans] == [35.6, 18.1]
    assert verdict(plans, 9 * 10**9) == "does not fit: weights alone take 10.0 GB of 9.0 GB"
    assert (
        verdict(plans, 18 * 10**9)
        == "does not fit: with int8:g8 all of it takes 18.1 GB of 18.0 GB, weights 10.0 GB of these"
    )
    assert verdict(plans, 24 * 10**9) == "fits with int8:g8 (18.1 GB of 24.0 GB); not with float32 (35.6 GB)"
    assert verdict(plans, 48 * 10**9) == "fits with every kv: at most 35.6 GB of 48.0 GB"


def test_the_command_takes_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family("Llama").config.save_pretrained(tmp_path)
    main(["plan", "--model", str(tmp_path), "--context", "20", "--weights", "61.1GB", "--memory", "24GB"])
    out = capsys.readouterr().out
    assert out.startswith("weights of 61,100,000,000 bytes;")
    assert out.endswith("does not fit: weights alone take 61.1 GB of 24.0 GB\n")
