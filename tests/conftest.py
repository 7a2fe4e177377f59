"""Settings of every test: deterministic examples, one seed, one thread, and marks that are what it does."""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

# Read when torch is loaded. Threads that spin while they wait take the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import campaign
import marks
import pytest
import torch
from browsers import NEEDS_BROWSER
from hypothesis import HealthCheck, settings

from kvloom import ops

# A shell's jobs in the background ignore Ctrl-C, and tests raise it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent
OF_MODELS = ("benchmarks", "clients", "integrations", "measuring", "serving", "test_examples.py")
"""Where tests compute with whole models of transformers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--campaign``."""
    parser.addoption(
        "--campaign",
        type=campaign.parsed,
        metavar="TIMES",
        help="make campaigns TIMES as long, with whole products of parameters where pairs are tested",
    )


@pytest.hookimpl(tryfirst=True)  # --hypothesis-profile comes later
def pytest_configure(config: pytest.Config) -> None:
    """The lengths of campaigns, before any test is imported."""
    campaign.given = config.getoption("campaign")
    settings.register_profile(
        "pr",
        derandomize=True,
        max_examples=campaign.times(50),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("pr")
    marks.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a mark says beside itself, before tests are chosen by marks."""
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker("process")
            item.add_marker(NEEDS_BROWSER)
        if is_of_models(item.path):
            item.add_marker("model")
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("campaign")


@functools.cache
def is_of_models(path: Path) -> bool:
    """Whether a file computes with whole models."""
    return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in OF_MODELS


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays, so that no garbage is looked for among it meanwhile."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Modules and tests stay: who collects garbage need not look at them."""
    keep_the_rest()


def keep_the_rest() -> None:
    """Collect garbage, and look no more at what is left.

    Sessions of transformers collect it each time, and what other tests left would take them 0.1 s.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries see their objects go."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A thread pool on busy cores only waits; what a module leaves stays."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    keep_the_rest()


@pytest.fixture(scope="module", params=["auto", "reference"])
def each_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of every call of ``ops.attend`` that names none; modules of judges run on each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "attend", functools.partial(ops.attend, backend=request.param))
        yield request.param


SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""``torch.manual_seed`` keeps the stack of its caller in a list, for a device that there may be later."""


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """A test that draws numbers without a generator of its own draws the same ones each time."""
    SEED(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """A test that has no mark ``process`` starts none, and one without ``compile`` compiles nothing.

    What a fixture of its module did before the test counts for the test. No fixture, which takes longer.
    """
    yield
    done = marks.done()
    missing = done if not any(map(item.get_closest_marker, ("process", "compile"))) else []
    assert not missing, f"needs pytest.mark.process or pytest.mark.compile, for {missing}"
