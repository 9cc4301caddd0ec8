"""``gradwire certs`` makes a CA and certificates, and uses the CA again."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.daemons import DEADLINE, run

from gradwire.cli import signing

FILES = ("ca", "server", "client")


def certs(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run("gradwire.cli", "certs", str(folder), *args)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(path: Path) -> set[str]:
    return {str(name.value) for name in signing.names_in(path)}


def test_one_command_makes_all_that_both_ends_need(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    done = certs(folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in folder.iterdir()} == {
        f"{name}{suffix}.pem" for name in FILES for suffix in ("", "-key")
    }
    for name in FILES:
        assert stat.S_IMODE((folder / f"{name}-key.pem").stat().st_mode) == 0o600
    assert names(folder / "server.pem") == {"localhost", "127.0.0.1", "::1"}
    assert names(folder / "client.pem") == {"spiffe://gradwire/client"}
    for said in (f"--tls-cert {folder}/server.pem", f'cert="{folder}/client.pem"', "export GRADWIRE_TLS_CA="):
        assert said in done.stdout


def test_what_is_there_stays(tmp_path: Path) -> None:
    certs(tmp_path)
    before = contents(tmp_path)
    done = certs(tmp_path)
    assert done.returncode == 0
    assert "everything is there already" in done.stdout
    assert contents(tmp_path) == before


def test_the_ca_signs_for_another_host_later(tmp_path: Path) -> None:
    certs(tmp_path, "--host", "first")
    before = contents(tmp_path)
    refused = certs(tmp_path, "--host", "gpu-box", "--host", "10.0.0.7")
    assert refused.returncode == 1
    assert "server.pem is not for gpu-box, 10.0.0.7; --force replaces it" in refused.stderr
    assert contents(tmp_path) == before
    assert certs(tmp_path, "--host", "gpu-box", "--host", "10.0.0.7", "--force").returncode == 0
    assert names(tmp_path / "server.pem") == {
        *("localhost", "127.0.0.1", "::1"),
        *("first", "gpu-box", "10.0.0.7"),
    }
    after = contents(tmp_path)
    assert {name for name in before if before[name] == after[name]} == {"ca.pem", "ca-key.pem"}


def test_clients_have_certificates_of_their_own(tmp_path: Path) -> None:
    certs(tmp_path)
    before = contents(tmp_path)
    done = certs(tmp_path, "--client", "anna", "--client", "bert")
    assert done.returncode == 0
    added = contents(tmp_path).keys() - before.keys()
    assert added == {f"client-{name}{suffix}.pem" for name in ("anna", "bert") for suffix in ("", "-key")}
    assert names(tmp_path / "client-anna.pem") == {"anna"}
    wrong = certs(tmp_path, "--client", "../anna")
    assert wrong.returncode == 1
    assert "is no name of a client" in wrong.stderr


@pytest.mark.parametrize("how", ["no key", "nonsense", "another's"])
def test_a_ca_that_cannot_sign_is_named(tmp_path: Path, how: str) -> None:
    certs(tmp_path / "a")
    key = tmp_path / "a" / "ca-key.pem"
    if how == "no key":
        key.unlink()
    elif how == "nonsense":
        key.write_text("nonsense")
    else:
        key.write_bytes((tmp_path / "a" / "client-key.pem").read_bytes())
    done = certs(tmp_path / "a", "--force")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path / "a") in done.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = certs(tmp_path / "file")
    assert done.returncode == 1
    assert f"cannot use {tmp_path / 'file'}" in done.stderr


def test_without_cryptography_it_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['cryptography'] = None\n"
        f"sys.argv = ['gradwire', 'certs', {str(tmp_path)!r}]\n"
        "from gradwire.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert "pip install 'gradwire[certs]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
