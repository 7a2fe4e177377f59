"""A server and a client; nothing here is collected where a server's packages are missing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from kvloom.integrations.transformers.versions import IS_4
from kvloom.serving import PACKAGES

if TYPE_CHECKING:
    import openai
    from oracles.serving import Served

MISSING = [name for name in (*PACKAGES, "openai", "llguidance") if find_spec(name) is None]
NEEDS_PACKAGES = [
    "test_access_log.py",
    "test_answers.py",
    "test_check_answers.py",
    "test_choosing.py",
    "test_clients.py",
    "test_dashboard.py",
    "test_drafts.py",
    "test_guard.py",
    "test_hostile.py",
    "test_latent_models.py",
    "test_log.py",
    "test_logprobs.py",
    "test_messages.py",
    "test_metrics.py",
    "test_models.py",
    "test_origins.py",
    "test_process.py",
    "test_prompts.py",
    "test_responses.py",
    "test_restarts.py",
    "test_sampling.py",
    "test_structured.py",
    "test_tls.py",
    "test_tokens.py",
    "test_tools.py",
]

NEEDS_PILLOW = ["test_picture_requests.py", "test_pictures.py"]

if MISSING or IS_4:
    collect_ignore = [*NEEDS_PACKAGES, *NEEDS_PILLOW]
elif find_spec("PIL") is None:
    collect_ignore = NEEDS_PILLOW


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server of the bundled model; modules that need other settings have their own."""
    from oracles.serving import served

    with served() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server."""
    with server.client() as client:
        yield client
