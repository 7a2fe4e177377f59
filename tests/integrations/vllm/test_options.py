"""``--additional-config``, and what decides whether vLLM takes its attention from here; without vLLM."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvloom.core.specs import QuantSpec
from kvloom.errors import ConfigError
from kvloom.integrations import vllm
from kvloom.integrations.vllm.options import Options

SERVED = " or ".join(vllm.TESTED)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Options(None, False)),
        ({"other": {"group": 3}}, Options(None, False)),
        ({"kvloom": {"group": 32}}, Options(32, False)),
        ({"kvloom": {"float": "auto"}}, Options(None, "auto")),
        ({"kvloom": {"float": True}}, Options(None, True)),
        ({"kvloom": {"smooth": "none"}}, Options(smooth="none")),
        (object(), Options(None, False)),
    ],
)
def test_options_are_read(given: Any, expected: Options) -> None:
    assert Options.of(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kvloom": 3}, "kvloom must be a mapping of options, got 3"),
        (
            {"kvloom": {"groups": 3}},
            "kvloom must have options group, float, recent, smooth only, got 'groups'",
        ),
        ({"kvloom": {"group": 0}}, "kvloom.group must be a positive int, got 0"),
        ({"kvloom": {"group": True}}, "kvloom.group must be a positive int, got True"),
        ({"kvloom": {"float": 1}}, "kvloom.float must be true, false or 'auto', got 1"),
        ({"kvloom": {"float": "yes"}}, "kvloom.float must be true, false or 'auto', got 'yes'"),
        ({"kvloom": {"recent": -1}}, "kvloom.recent must be an int of at least 0, got -1"),
        ({"kvloom": {"smooth": "values"}}, "kvloom.smooth must be one of keys, none, got 'values'"),
        ({"kvloom": {"smooth": None}}, "kvloom.smooth must be one of keys, none, got None"),
        ({"kvloom": {"recent": True}}, "kvloom.recent must be an int of at least 0, got True"),
    ],
)
def test_a_wrong_option_is_a_sentence(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.of(given)


@pytest.mark.parametrize(
    ("head_dim", "group"), [(128, 64), (64, 64), (32, 32), (80, 16), (96, 32), (576, 64)]
)
def test_a_group_that_was_not_given_divides_the_head(head_dim: int, group: int) -> None:
    assert Options().quant(8, head_dim) == QuantSpec(8, group)


@pytest.mark.parametrize(
    ("options", "bits", "expected"),
    [
        (Options(), 8, "int8:g64"),
        (Options(), 4, "int4:g64"),
        (Options(recent=0), 4, "int4:g64,recent=0"),
        (Options(32, recent=16, smooth="none"), 8, "int8:g32,recent=16,smooth=none"),
    ],
    ids=str,
)
def test_a_layer_is_named_as_that_of_a_pool(options: Options, bits: int, expected: str) -> None:
    kind = options.kind(bits, 64)
    assert str(kind) == expected
    assert kind.rotates("keys") == (bits == 4) and not kind.rotates("values")


def test_a_group_that_was_given_is_kept_or_refused() -> None:
    assert Options(group=32).quant(4, 128) == QuantSpec(4, 32, full_range=True)
    with pytest.raises(ConfigError, match=r"kvloom\.group must divide the head dim 80, got 32"):
        Options(group=32).quant(8, 80)


class TestRegistration:
    """Why vLLM does not take its attention from here."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVLOOM_VLLM", raising=False)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        point = EntryPoint("kvloom", "kvloom.integrations.vllm:register", "vllm.general_plugins")
        monkeypatch.setattr(vllm, "entry_points", lambda group: [point])
        monkeypatch.setattr(vllm, "vllm_version", lambda: vllm.TESTED[0])

    @pytest.mark.parametrize("found", vllm.TESTED)
    def test_a_tested_version_is_served(self, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm, "vllm_version", lambda: found)
        assert vllm.why_not_registered() is None

    def test_zero_switches_it_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVLOOM_VLLM", "0")
        assert vllm.why_not_registered() == "KVLOOM_VLLM is 0"
        vllm.register()  # imports nothing of vLLM, which is not here

    @pytest.mark.parametrize(
        ("found", "reason"),
        [(None, "vLLM is not installed"), ("0.31.0", f"vLLM must be {SERVED}, got 0.31.0")],
    )
    def test_another_version_is_not_served(
        self, found: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm, "vllm_version", lambda: found)
        assert vllm.why_not_registered() == reason

    def test_a_version_that_has_moved_everything_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("vllm", "vllm.platforms"):  # of which the second may be loaded
            monkeypatch.setitem(sys.modules, name, None)  # an ImportError
        with pytest.raises(ImportError):
            vllm.register()
        monkeypatch.setattr(vllm, "vllm_version", lambda: "0.99.0")
        vllm.register()
        assert f"guards nothing: vLLM must be {SERVED}, got 0.99.0" in caplog.text

    def test_a_list_of_plug_ins_may_leave_it_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", "other")
        assert vllm.why_not_registered() == "VLLM_PLUGINS names other plug-ins: other"
        monkeypatch.setenv("VLLM_PLUGINS", "other,kvloom")
        assert vllm.why_not_registered() is None

    def test_an_installation_without_the_entry_point_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm, "entry_points", lambda group: [])
        assert "no entry point" in str(vllm.why_not_registered())


@pytest.mark.process
def test_loading_the_entry_point_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, kvloom.integrations.vllm; print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
