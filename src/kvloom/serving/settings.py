"""Settings of a server."""

import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from kvloom.core.arguments import expect_within
from kvloom.errors import ArgumentError

KEYS_VARIABLE: Final = "KVLOOM_API_KEY"
"""Environment variable with API keys, separated by commas, since other users can read command lines."""

MOST: Final = 2**31 - 1
"""Largest number of tokens, pages, requests or bytes in a setting."""

PICTURE_TOKENS: Final = 16384
"""Default number of kept tokens of chats with pictures."""

_MOST_SECONDS: Final = 31_536_000
"""A year."""

_ORIGIN: Final = re.compile(r"https?://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


@dataclass(frozen=True)
class Settings:
    """Settings of a server, beside its model.

    Attributes:
        host: Address that it listens on.
        port: Port; 0 is any that is free.
        api_keys: Keys that a request may have; without keys, every request is answered.
        allowed_origins: Origins of web pages, beside the server's own, that may send requests.
        tls_certificate: PEM file of the server's certificate chain; ``None`` for HTTP without TLS.
        tls_key: PEM file of its key, without a password.
        access_log: Whether each request is a line of the log.
        max_tokens: Largest number of new tokens of one answer.
        max_answers: Largest number of answers that are computed or wait at one time.
        max_seconds: Largest time from the last byte of a request to the last byte of its answer.
        max_body_bytes: Largest body of a request.
        max_header_bytes: Largest headers of a request, names and values together.
        header_seconds: Time in which the next request's headers must have come on a connection.
        body_seconds: Time in which the body of a request must have come.
        drain_seconds: Time that a stopping server gives to answers that have begun.
        session_share: Share of all pages that sessions of agents may hold, divided equally among keys.
        session_seconds: Time after which an unused session of an agent is forgotten.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    access_log: bool = False
    max_tokens: int = 4096
    max_answers: int = 128
    max_seconds: float = 600.0
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    drain_seconds: float = 30.0
    session_share: float = 0.5
    session_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_answers", "max_body_bytes", "max_header_bytes"):
            expect_within(name, getattr(self, name), 1, MOST)
        for name in ("max_seconds", "header_seconds", "body_seconds", "drain_seconds", "session_seconds"):
            expect_within(name, getattr(self, name), 0.01, _MOST_SECONDS)
        expect_within("session_share", self.session_share, 0, 1)
        expect_within("port", self.port, 0, 65535)
        try:
            self.host.encode("idna")
        except UnicodeError as error:
            raise ArgumentError(f"host must be a name or an address, got {self.host!r}: {error}") from error
        for origin in self.allowed_origins:
            if _ORIGIN.fullmatch(origin) is None:
                raise ArgumentError(
                    f"allowed_origins must be such as http://localhost:3000, without a path, got {origin!r}"
                )
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise ArgumentError(
                "api_keys must be printable ASCII without spaces around it, got one that is not"
            )
        self._check_tls()
        if not self.api_keys and not is_loopback(self.host):
            raise ArgumentError(
                f"host must be a loopback address unless {KEYS_VARIABLE} is set, got {self.host!r}"
            )

    def _check_tls(self) -> None:
        """Raise ArgumentError unless certificate and key match, or neither is given."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ArgumentError("tls_certificate must be given with its key, got one of the two")
        if self.tls_certificate is not None and self.tls_key is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.tls_certificate, self.tls_key, password="")
            except (OSError, ValueError) as error:
                raise ArgumentError(
                    f"tls_certificate and its key must be files in PEM without a password, got "
                    f"{str(self.tls_certificate)!r} and {str(self.tls_key)!r}: {error}"
                ) from error

    @property
    def url(self) -> str:
        """Scheme and host of the server's URLs, without a port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_certificate is None else 'https'}://{host}"


def expect_writable(name: str, path: Path) -> None:
    """Raise ArgumentError unless a file can be written; its content is unchanged."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ArgumentError(f"{name} must be a file that can be written: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost is not looked up."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def keys_from(options: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """API keys of the command line and of the environment."""
    named = environment.get(KEYS_VARIABLE, "").split(",")
    return (*options, *(key.strip() for key in named if key.strip()))
