"""HTTPS, with a certificate that is made here."""

from __future__ import annotations

import datetime
import http.client
import json
import socket
import ssl
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from oracles.serving import PROMPT, Served, served

from kvloom.errors import ArgumentError
from kvloom.serving.settings import Settings

BODY = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
PLAIN = serialization.NoEncryption()


def certificate_in(
    folder: Path, encryption: serialization.KeySerializationEncryption = PLAIN
) -> dict[str, Path]:
    """A certificate of this machine that signs itself, and its key, as ``Settings`` take them."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number(), now - day, now + day
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    certificate, keys = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    keys.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))
    return {"tls_certificate": certificate, "tls_key": keys}


def ask(server: Served, files: dict[str, Path], **headers: str) -> tuple[int, bytes]:
    """Status and body, of a client that knows the certificate and no other."""
    context = ssl.create_default_context(cafile=str(files["tls_certificate"]))
    with closing(http.client.HTTPSConnection("127.0.0.1", server.port, context=context)) as connection:
        connection.request("POST", "/v1/completions", BODY, headers)
        with connection.getresponse() as response:
            return response.status, response.read()


def test_whoever_knows_the_certificate_is_answered_and_nobody_without_tls(tmp_path: Path) -> None:
    files = certificate_in(tmp_path)
    with served(**files) as server:
        status, answer = ask(server, files)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 1
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            server.send("GET", "/v1/models")
        other = certificate_in(tmp_path / "other")
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, other)
        with socket.create_connection(("127.0.0.1", server.port)):  # it begins no handshake
            assert ask(server, files)[0] == 200


def test_a_page_of_the_server_itself_is_one_that_came_by_tls(tmp_path: Path) -> None:
    files = certificate_in(tmp_path)
    with served(**files) as server:
        assert ask(server, files, Origin=f"https://127.0.0.1:{server.port}")[0] == 200
        assert ask(server, files, Origin=f"http://127.0.0.1:{server.port}")[0] == 403


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    files, other = certificate_in(tmp_path / "a"), certificate_in(tmp_path / "b")
    locked = certificate_in(tmp_path / "c", serialization.BestAvailableEncryption(b"password"))
    assert Settings(**files).url == "https://127.0.0.1"
    for bad in (
        {**files, "tls_key": other["tls_key"]},
        {**files, "tls_key": files["tls_certificate"]},
        {**files, "tls_certificate": tmp_path / "none.pem"},
        locked,  # nobody is asked for the password
    ):
        with pytest.raises(ArgumentError, match="tls_certificate and its key must be files in PEM"):
            Settings(**bad)
    with pytest.raises(ArgumentError, match="tls_certificate must be given with its key"):
        Settings(tls_key=files["tls_key"])


def test_tls_does_not_replace_a_key(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="host must be a loopback address unless KVLOOM_API_KEY is set"):
        Settings(host="0.0.0.0", **certificate_in(tmp_path))
