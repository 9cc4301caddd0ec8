"""Settings of TLS, and certificates that follow their files."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import pytest
from tests.integration.certificates import Certificates, install

from gradwire import errors
from gradwire.system.certificates import CertificateFiles, WatchedCertificates
from gradwire.transport import LinkSettings, Tls
from gradwire.transport.tls import certificates_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("others"))


def copied(made: Certificates, folder: Path) -> CertificateFiles:
    """Files of a test's own."""
    install(made, "client", folder, "own")
    (folder / "ca.pem").write_bytes(made.ca.read_bytes())
    return CertificateFiles(str(folder / "ca.pem"), str(folder / "own.pem"), str(folder / "own-key.pem"))


# -- settings


def test_the_same_files_are_the_same_settings_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    absolute = Tls(tmp_path / "ca.pem")
    assert Tls("ca.pem") == Tls("~/ca.pem") == Tls("./x/../ca.pem") == absolute
    assert LinkSettings(tls=Tls("ca.pem")) == LinkSettings(tls=absolute)
    assert hash(LinkSettings(tls=Tls("ca.pem"))) == hash(LinkSettings(tls=absolute))


def test_the_environment_says_nothing_or_something(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"GRADWIRE_TLS_{name}", raising=False)
    assert Tls.from_environment() is None
    monkeypatch.setenv("GRADWIRE_TLS_CA", "")
    assert Tls.from_environment() is None
    monkeypatch.setenv("GRADWIRE_TLS_CA", "/ca.pem")
    monkeypatch.setenv("GRADWIRE_TLS_SERVER_NAME", "box")
    assert Tls.from_environment() == Tls("/ca.pem", server_name="box")


# -- what is wrong with files


@pytest.mark.parametrize(
    ("ca", "cert", "key", "said"),
    [
        ("nothing", None, None, "cannot read .*nothing.pem: No such file"),
        ("client-key", None, None, r"client-key.pem has no certificate of a CA that can be read"),
        ("empty", None, None, "empty.pem has no certificate of a CA"),
        ("ca", "client", None, "client.pem was given without the key"),
        ("ca", None, "client-key", "client-key.pem was given without the certificate"),
        ("ca", "client", "server-key", "server-key.pem is not the key of the certificate in .*client.pem"),
        ("ca", "client-key", "client", "client-key.pem has no certificate in it"),
        ("ca", "client", "client", "client.pem has no private key in it"),
        ("ca", "client", "encrypted", "encrypted.pem is encrypted; store the key without a password"),
        ("ca", "broken", "client-key", "broken.pem with the key .* cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    made: Certificates, ca: str, cert: str | None, key: str | None, said: str
) -> None:
    from cryptography.hazmat.primitives import serialization

    made.path("empty").write_bytes(b"")
    made.path("broken").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    plain = serialization.load_pem_private_key(made.path("client-key").read_bytes(), None)
    made.path("encrypted").write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    tls = Tls(*(made.path(name) if name else None for name in (ca, cert, key)))
    with pytest.raises(errors.ConnectFailed, match=said) as caught:
        certificates_of(tls)
    assert not caught.value.retryable


def test_comments_in_any_encoding_may_stand_between_certificates(made: Certificates, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes("# Prüfstelle\n".encode("latin-1") + made.ca.read_bytes())
    assert certificates_of(Tls(path)).latest().ca == path.read_bytes()


# -- files that change


def test_links_with_the_same_files_share_what_was_read(made: Certificates) -> None:
    first = certificates_of(made.tls("client"))
    assert certificates_of(made.tls("client", "another name")) is first
    assert certificates_of(made.tls()) is not first


def test_certificates_follow_their_files(
    made: Certificates, others: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gradwire.tls")
    watched = WatchedCertificates(copied(made, tmp_path))
    first = watched.latest()
    assert watched.latest() is first
    install(others, "client", tmp_path, "own")
    second = watched.latest()
    assert second is not first
    assert second.cert == others.path("client").read_bytes()
    assert watched.latest() is second
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_the_same_content_again_is_no_change(made: Certificates, tmp_path: Path) -> None:
    watched = WatchedCertificates(copied(made, tmp_path))
    first = watched.latest()
    copied(made, tmp_path)
    assert watched.latest() is first


@pytest.mark.parametrize("how", ["nonsense", "nothing", "another's key"])
def test_bad_files_leave_the_last_good_ones_in_use_and_are_reported_once(
    made: Certificates, others: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    watched = WatchedCertificates(copied(made, tmp_path))
    first = watched.latest()
    key = tmp_path / "own-key.pem"
    if how == "nothing":
        key.unlink()
    else:
        key.write_bytes(b"nonsense" if how == "nonsense" else others.path("client-key").read_bytes())
    for _ in range(3):
        assert watched.latest() is first
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert str(key) in warning.getMessage()
    assert "the last good ones stay in use" in warning.getMessage()
    install(others, "client", tmp_path, "own")
    assert watched.latest().cert == others.path("client").read_bytes()
    assert len(caplog.records) == 1


def test_files_behind_a_link_that_is_turned_are_noticed(
    made: Certificates, others: Certificates, tmp_path: Path
) -> None:
    """As Kubernetes renews a mounted secret."""
    for folder, found in (("old", made), ("new", others)):
        (tmp_path / folder).mkdir()
        copied(found, tmp_path / folder)
    (tmp_path / "now").symlink_to("old")
    files = CertificateFiles(*(str(tmp_path / "now" / f"{name}.pem") for name in ("ca", "own", "own-key")))
    watched = WatchedCertificates(files)
    (tmp_path / "next").symlink_to("new")
    os.replace(tmp_path / "next", tmp_path / "now")
    assert watched.latest().cert == others.path("client").read_bytes()


def test_nothing_of_a_key_is_written_to_a_disk(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates are checked from memory: what was read is what is used."""
    loaded: list[str] = []
    load = ssl.SSLContext.load_cert_chain

    def recorded(context: ssl.SSLContext, cert: str, key: str, **more: object) -> None:
        loaded.extend(os.readlink(path) for path in (cert, key))
        load(context, cert, key, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", recorded)
    WatchedCertificates(made.tls("client").files)
    assert loaded
    assert all(path.startswith("/memfd:") for path in loaded)
