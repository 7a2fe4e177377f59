"""What a server is started with."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from kvloom.errors import ArgumentError

KEYS_VARIABLE: Final = "KVLOOM_API_KEY"
"""Environment variable with API keys, commas between them: command lines are read by others."""


@dataclass(frozen=True)
class Settings:
    """What a server is started with, beside its model.

    Attributes:
        host: Address that it listens on.
        port: Port; 0 is any that is free.
        api_keys: Keys that a request may have; with none, every request is answered.
        max_tokens: New tokens of one answer, at most.
        max_answers: Answers that are computed or wait at one time, at most.
        max_seconds: For one request, from its last byte to the last byte of its answer.
        max_body_bytes: Of a request.
        max_header_bytes: Of a request, names and values together.
        header_seconds: In which the next request's headers must have come on a connection.
        body_seconds: In which the body of a request must have come.
        drain_seconds: That a server which is stopped gives the answers that have begun.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_tokens: int = 4096
    max_answers: int = 128
    max_seconds: float = 600.0
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in (
            "max_tokens",
            "max_answers",
            "max_seconds",
            "max_body_bytes",
            "max_header_bytes",
            "header_seconds",
            "body_seconds",
            "drain_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise ArgumentError(f"port must be 0 to 65535, got {self.port}")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise ArgumentError(
                "api_keys must be printable ASCII without spaces around it, got one that is not"
            )
        if not self.api_keys and not is_loopback(self.host):
            raise ArgumentError(
                f"host must be a loopback address without an API key, got {self.host!r}: set {KEYS_VARIABLE}"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is not looked up."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keys_from(options: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Keys of the command line and of the environment."""
    named = environment.get(KEYS_VARIABLE, "").split(",")
    return (*options, *(key.strip() for key in named if key.strip()))
