"""HTTPS by the server itself: a real client, certificates that change while it serves, and files that are wrong."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.clock import Clock
from tests.api.http import COMPLETIONS, PROMPT
from tests.api.test_server import address_of, process
from tests.waiting import PATIENCE, wait_until
from weft.api.server import Certificate
from weft.errors import ConfigError
from weft.options import ServerOptions
from weft.serving.auth import POLL_S

PASSWORD = "open sesame"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two certificates for localhost that sign themselves, and an encrypted key."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for name in ("old", "new"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")  # fmt: skip
    openssl("ec", "-in", "old.key", "-aes256", "-passout", f"pass:{PASSWORD}", "-out", "encrypted.key")
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Puts a certificate and its key where the server's are, the certificate first, as settings."""

    def put(name: str, *suffixes: str) -> dict[str, Any]:
        for suffix in suffixes or (".pem", ".key"):
            shutil.copy(made / f"{name}{suffix}", tmp_path / f"next{suffix}")
            (tmp_path / f"next{suffix}").rename(tmp_path / f"server{suffix}")
        return {"ssl_certfile": str(tmp_path / "server.pem"), "ssl_keyfile": str(tmp_path / "server.key")}

    return put


def trusting(*certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    for certificate in certificates:
        context.load_verify_locations(certificate)
    return context


def shown(url: str) -> str:
    """The certificate that a new connection gets."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    return ssl.get_server_certificate((address.hostname, address.port), timeout=PATIENCE).strip()


def pem(made: Path, name: str) -> str:
    return (made / f"{name}.pem").read_text().strip()


def test_a_certificate_changes_while_a_stream_goes_on(made: Path, files: Callable[..., Any], tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    settings = files("old") | {"log_level": "info"}
    with process(settings=settings, answer_when=str(go_on), chunks=1000) as child:
        url = address_of(child)
        assert url.startswith("https://")
        trusted = trusting(made / "old.pem")
        with httpx.Client(base_url=url, verify=trusted, timeout=PATIENCE) as client:
            assert client.get("/v1/models").status_code == 200
            with client.stream("POST", COMPLETIONS, json=PROMPT | {"stream": True}) as stream:
                pieces = stream.iter_text()
                assert "begun" in next(pieces)
                assert shown(url) == pem(made, "old")
                files("new")
                wait_until(lambda: shown(url) == pem(made, "new"), "the new certificate")
                assert (
                    httpx.get(url + "/health", verify=trusting(made / "new.pem"), timeout=PATIENCE).status_code == 200
                )
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    httpx.get(url + "/health", verify=trusted, timeout=PATIENCE)
                go_on.touch()
                text = "".join(pieces)
            assert "[999]" in text and text.rstrip().endswith("[DONE]"), "more than every buffer holds"
            assert client.get("/v1/models").status_code == 200, "and the connection goes on"

        files("old", ".key")
        os.kill(child.pid, signal.SIGHUP)
        assert child.stderr is not None
        while "the certificate stays as it was" not in (line := child.stderr.readline()):
            assert line, "the log ended"
        assert "the key does not belong to the certificate" in line and shown(url) == pem(made, "new")


def test_without_tls_nothing_is_answered(files: Callable[..., Any]) -> None:
    with process(settings=files("old")) as child:
        address = urlsplit(address_of(child))
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=PATIENCE) as connection:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP" not in connection.recv(100)


def test_files_are_looked_at_once_a_second_and_broken_ones_change_nothing(
    made: Path, files: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    certificate = Certificate(ServerOptions(**files("old")), clock=clock)

    def handed_out() -> str:
        """What a handshake in memory gets."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = certificate.context.wrap_bio(to_server, to_client, server_side=True)
        client = context.wrap_bio(to_client, to_server, server_hostname="localhost")
        for side in (client, server, client):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
        return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"").strip()

    assert handed_out() == pem(made, "old")
    files("new", ".pem")
    assert handed_out() == pem(made, "old"), "not looked at yet"
    clock.now += POLL_S
    with caplog.at_level(logging.ERROR):
        assert handed_out() == pem(made, "old"), "the key is still the old one"
    assert "the key does not belong to the certificate" in caplog.text
    files("new", ".key")
    clock.now += POLL_S
    assert handed_out() == pem(made, "new")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssl_keyfile": "old.key"}, "--ssl-certfile"),
        ({"ssl_certfile": "none.pem", "ssl_keyfile": "old.key"}, "none.pem: No such file"),
        ({"ssl_certfile": "old.pem", "ssl_keyfile": "none.key"}, "none.key: No such file"),
        ({"ssl_certfile": "old.pem", "ssl_keyfile": "new.key"}, "the key does not belong to the certificate"),
        ({"ssl_certfile": "old.key", "ssl_keyfile": "old.key"}, "PEM files"),
        ({"ssl_certfile": "old.pem"}, "PEM files"),
        ({"ssl_certfile": "old.pem", "ssl_keyfile": "encrypted.key"}, "is encrypted. Set --ssl-keyfile-password"),
        (
            {"ssl_certfile": "old.pem", "ssl_keyfile": "encrypted.key", "ssl_keyfile_password": "wrong"},
            "--ssl-keyfile-password is wrong",
        ),
    ],
)
def test_files_that_cannot_be_used_are_explained(made: Path, settings: dict[str, str], said: str) -> None:
    paths = {name: value if name.endswith("password") else str(made / value) for name, value in settings.items()}
    with pytest.raises(ConfigError) as refused:
        Certificate(ServerOptions(**paths))
    assert said in str(refused.value)


def test_a_key_may_be_encrypted_or_in_the_file_of_the_certificate(made: Path, tmp_path: Path) -> None:
    encrypted = {"ssl_keyfile": str(made / "encrypted.key"), "ssl_keyfile_password": PASSWORD}
    Certificate(ServerOptions(ssl_certfile=str(made / "old.pem"), **encrypted))
    both = tmp_path / "both.pem"
    both.write_text((made / "old.pem").read_text() + (made / "old.key").read_text())
    Certificate(ServerOptions(ssl_certfile=str(both)))


def test_a_server_that_cannot_have_tls_does_not_start(made: Path) -> None:
    settings = {"ssl_certfile": str(made / "old.pem"), "ssl_keyfile": str(made / "new.key")}
    with process(settings=settings) as child:
        _, told = child.communicate(timeout=PATIENCE)
        assert (
            child.returncode != 0 and "the key does not belong to the certificate" in told and "Traceback" not in told
        )
