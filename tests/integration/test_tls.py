"""Links with TLS: what they carry, what they refuse and why, and certificates that are replaced meanwhile."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.carriers import carrier_of
from tests.faults.proxy import FaultyProxy
from tests.integration.certificates import Certificates, install
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, run

import gradwire as gw
import gradwire_server as gws
from gradwire.optim import DistributedOptimizer

SECONDS = 30.0
PATIENCE = 60.0
"""As a connect timeout: what can never succeed must fail long before."""

SERVED = """
import gradwire as gw
import gradwire_server as gws

@gws.expose
def double(x):
    return 2 * x

@gws.expose
def double_at(address, x, **options):
    return gw.connect(address, **options).double(x)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of both ends, and some that have expired or are for other hosts."""
    found = Certificates(tmp_path_factory.mktemp("certificates"))
    found.sign("expired-server", expired=True)
    found.sign("expired-client", "client", serves=False, expired=True)
    found.sign("elsewhere", "elsewhere.example")
    return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of another CA."""
    return Certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture(autouse=True)
def no_settings_of_a_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY", "SERVER_NAME"):
        monkeypatch.delenv(f"GRADWIRE_TLS_{name}", raising=False)


def double(x: Any) -> Any:
    return 2 * x


def eventually(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def link_of(worker: gw.RemoteWorker) -> Any:
    return worker._link


def own_copy(found: Certificates, folder: Path) -> Path:
    """Files that a test may replace."""
    shutil.copytree(found.folder, folder)
    return folder


def in_folder(folder: Path, name: str) -> dict[str, Path]:
    return {"tls_cert": folder / f"{name}.pem", "tls_key": folder / f"{name}-key.pem"}


# -- what goes over them


@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mutual TLS"])
@pytest.mark.parametrize("carrier", ["grpc", "unix"])
def test_results_and_gradients_are_those_of_one_process(
    made: Certificates, mutual: bool, carrier: str
) -> None:
    def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ weight).pow(3)

    client_ca = {"tls_client_ca": made.ca} if mutual else {}
    with gws.Worker(layers, **made.of_server(), **client_ca) as server:
        tls = made.tls("client" if mutual else None)
        with gw.connect(server.address, tls=tls, same_host=carrier == "unix") as worker:
            for size in (3, 400):  # within a message, and beside it
                here = [torch.randn(size, size, dtype=torch.float64, requires_grad=True) for _ in range(2)]
                there = [tensor.detach().clone().requires_grad_() for tensor in here]
                expected, result = layers(*here), worker.layers(*there)
                assert torch.equal(expected, result)
                expected.sum().backward()
                result.sum().backward()
                for local, remote in zip(here, there, strict=True):
                    assert local.grad is not None
                    assert remote.grad is not None
                    assert torch.equal(local.grad, remote.grad)
            assert carrier_of(worker._link) == carrier


def test_nothing_goes_around_tls_in_plain_text(made: Certificates) -> None:
    """The direct socket is neither asked for, nor offered, nor taken."""
    with gws.Worker(double, **made.of_server()) as server:
        assert not server._settings.direct
        with gw.connect(server.address, tls=made.tls(), same_host=False) as worker:
            assert worker.double(21) == 42
            assert carrier_of(worker._link) == "grpc"
            assert not server._acceptor._listeners
            link = link_of(worker)
            assert not link._hello(99).direct


def test_a_client_takes_no_direct_socket_that_it_did_not_ask_for(made: Certificates) -> None:
    with gws.Worker(double, **made.of_server()) as server:
        acceptor = server._acceptor
        acceptor._settings = replace(acceptor._settings, direct=True)
        listeners_for = acceptor._listeners_for

        def offer_anyway(hello: Any) -> Any:
            hello.direct = True
            return listeners_for(hello)

        acceptor._listeners_for = offer_anyway  # type: ignore[method-assign]
        with gw.connect(server.address, tls=made.tls(), same_host=False) as worker:
            assert worker.double(21) == 42
            assert carrier_of(worker._link) == "grpc"
            assert "direct" in acceptor._listeners


def test_a_unix_socket_is_plain_text(made: Certificates, tmp_path: Path) -> None:
    binds = ["127.0.0.1:0", f"unix:{tmp_path}/worker.sock"]
    with gws.Worker(double, bind=binds, **made.of_server(), tls_client_ca=made.ca) as server:
        with gw.connect(server.addresses[1]) as worker:
            assert worker.double(21) == 42


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_before_1_2_get_nowhere(made: Certificates, version: ssl.TLSVersion) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(made.ca)
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")  # OpenSSL itself refuses old versions otherwise
    context.minimum_version = context.maximum_version = version
    with gws.Worker(double, **made.of_server()) as server:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), SECONDS) as connection:
            if version < ssl.TLSVersion.TLSv1_2:
                with pytest.raises(OSError, match=r"EOF|ALERT|alert|reset"):
                    context.wrap_socket(connection, server_hostname=host)
            else:
                with context.wrap_socket(connection, server_hostname=host) as secured:
                    assert secured.recv(1)


# -- what is refused, and why


@contextmanager
def refused(said: str) -> Iterator[None]:
    started = time.monotonic()
    with pytest.raises(gw.ConnectFailed, match=said) as caught:
        yield
    assert time.monotonic() - started < PATIENCE / 2
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        ("server", "not signed by a CA that this process trusts: give the CA of the worker"),
        ("expired-server", "its certificate has expired"),
        ("elsewhere", r"its certificate is not for '127\.0\.0\.1': .*server_name"),
    ],
)
def test_a_certificate_of_a_worker_that_is_no_good_is_said_to_be(
    made: Certificates, others: Certificates, certificate: str, said: str
) -> None:
    with gws.Worker(double, **made.of_server(certificate)) as server:
        tls = others.tls() if certificate == "server" else made.tls()
        with refused(said):
            gw.connect(server.address, tls=tls, connect_timeout=PATIENCE)


def test_another_name_may_be_expected(made: Certificates) -> None:
    with gws.Worker(double, **made.of_server("elsewhere")) as server:
        with gw.connect(server.address, tls=made.tls(server_name="elsewhere.example")) as worker:
            assert worker.double(21) == 42


@pytest.mark.parametrize("client", [None, "expired-client", "of another CA"])
def test_a_client_without_a_good_certificate_is_told_so(
    made: Certificates, others: Certificates, client: str | None
) -> None:
    tls, said = made.tls(client), "refuses the certificate .*expired-client.pem of this process"
    if client is None:
        said = "takes only clients that have a certificate: give one"
    elif client == "of another CA":
        theirs = others.tls("client")
        tls, said = gw.Tls(made.ca, theirs.cert, theirs.key), "not signed by a CA in the file of"
    with gws.Worker(double, **made.of_server(), tls_client_ca=made.ca) as server:
        with refused(said):
            gw.connect(server.address, tls=tls, connect_timeout=PATIENCE)


def test_one_end_with_tls_and_the_other_without(made: Certificates, tmp_path: Path) -> None:
    with gws.Worker(double, **made.of_server()) as server, refused("it speaks TLS: give its CA"):
        gw.connect(server.address, connect_timeout=PATIENCE)
    with gws.Worker(double, **made.of_server(), tls_client_ca=made.ca) as server, refused("it speaks TLS"):
        gw.connect(server.address, connect_timeout=PATIENCE)
    binds = ["127.0.0.1:0", f"unix:{tmp_path}/worker.sock"]
    with gws.Worker(double, bind=binds) as server:
        for address in server.addresses:
            with refused("it speaks no TLS: start it with --tls-cert"):
                gw.connect(address, tls=made.tls(), connect_timeout=PATIENCE)


def test_a_server_of_something_else_is_recognized(made: Certificates) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.path("server"), made.path("server-key"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    context.wrap_socket(connection, server_side=True).close()
                except ssl.SSLError:
                    pass
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with refused("not HTTP/2, so it is no gradwire worker"):
                gw.connect(f"127.0.0.1:{listener.getsockname()[1]}", tls=made.tls(), connect_timeout=PATIENCE)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_worker_that_is_not_up_yet_is_waited_for(made: Certificates) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(gw.connect, address, tls=made.tls(), connect_timeout=PATIENCE)
        time.sleep(0.3)  # some attempts fail
        assert not connecting.done()
        with gws.Worker(double, bind=address, **made.of_server()), connecting.result(SECONDS) as worker:
            assert worker.double(21) == 42


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("nothing", "server-key", None), "cannot read .*nothing.pem"),
        (("server", "client-key", None), "is not the key of"),
        (("server", "server-key", "server-key"), "server-key.pem has no certificate of a CA"),
        (("server", None, None), "was given without the key"),
        ((None, None, "ca"), "ca.pem, is of no use without a certificate and a key"),
    ],
)
def test_a_worker_with_files_that_cannot_be_used_does_not_start(
    made: Certificates, files: tuple[str | None, ...], said: str
) -> None:
    names = ("tls_cert", "tls_key", "tls_client_ca")
    given = {name: made.path(file) for name, file in zip(names, files, strict=True) if file}
    with pytest.raises(gws.CertificateError, match=said) as caught:
        gws.Worker(double, **given)  # type: ignore[arg-type]
    assert caught.value.exit_code == 8


def test_a_port_for_direct_sockets_is_of_no_use_with_tls(made: Certificates) -> None:
    with pytest.raises(ValueError, match="direct sockets are plain text"):
        gws.Worker(double, **made.of_server(), direct_bind="127.0.0.1:0")  # type: ignore[arg-type]


# -- certificates that are replaced at the worker


def test_a_worker_shows_its_new_certificate_to_whom_connects_then(
    made: Certificates, others: Certificates, tmp_path: Path
) -> None:
    folder = own_copy(made, tmp_path / "worker")
    with gws.Worker(double, **in_folder(folder, "server")) as server:
        before = gw.connect(server.address, tls=made.tls())
        install(others, "server", folder, "server")
        with gw.connect(server.address, tls=others.tls()) as after:
            assert after.double(1) == before.double(1) == 2
        before.close()
        with refused("not signed by a CA that this process trusts"):
            gw.connect(server.address, tls=made.tls(), connect_timeout=PATIENCE)


def test_a_worker_that_trusts_another_ca_refuses_the_clients_of_the_old_one(
    made: Certificates, others: Certificates, tmp_path: Path
) -> None:
    client_ca = tmp_path / "clients.pem"
    shutil.copy(made.ca, client_ca)
    theirs = others.tls("client")
    with gws.Worker(double, **made.of_server(), tls_client_ca=client_ca) as server:
        gw.connect(server.address, tls=made.tls("client")).close()
        client_ca.write_bytes(others.ca.read_bytes())
        with refused("refuses the certificate .*client.pem"):
            gw.connect(server.address, tls=made.tls("client"), connect_timeout=PATIENCE)
        with gw.connect(server.address, tls=gw.Tls(made.ca, theirs.cert, theirs.key)) as worker:
            assert worker.double(21) == 42


def test_a_worker_keeps_its_last_good_certificate(
    made: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = own_copy(made, tmp_path / "worker")
    with gws.Worker(double, **in_folder(folder, "server")) as server:
        (folder / "server.pem").write_text("half a cert")
        for _ in range(2):
            with gw.connect(server.address, tls=made.tls(), same_host=False) as worker:
                assert worker.double(21) == 42
    warnings = [record for record in caplog.records if record.name == "gradwire.tls"]
    assert [record.levelno for record in warnings] == [logging.WARNING]
    assert f"{folder}/server.pem has no certificate in it" in warnings[0].getMessage()


# -- certificates that are replaced at a client


@pytest.mark.parametrize("waits", [True, False], ids=["waits for ready", "does not wait"])
@pytest.mark.parametrize("carrier", ["grpc", "unix"])
def test_a_client_moves_to_its_new_certificate_and_loses_nothing(
    made: Certificates, others: Certificates, tmp_path: Path, carrier: str, waits: bool
) -> None:
    folder = own_copy(made, tmp_path / "client")
    tls = gw.Tls(made.ca, folder / "client.pem", folder / "client-key.pem")
    both = tmp_path / "both.pem"
    both.write_bytes(made.ca.read_bytes() + others.ca.read_bytes())
    calls: list[int] = []
    let_go = threading.Event()

    def held(x: torch.Tensor, number: int) -> torch.Tensor:
        calls.append(number)
        assert let_go.wait(SECONDS)
        return 3 * x

    with gws.Worker(double, held, **made.of_server(), tls_client_ca=both) as server:
        options = {"same_host": carrier == "unix", "wait_for_ready": waits}
        with gw.connect(server.address, tls=tls, **options) as worker:
            link = link_of(worker)
            assert carrier_of(link) == carrier
            waiting = [torch.ones(50_000, requires_grad=True) for _ in range(4)]
            futures = [worker.call_async("held", x, number) for number, x in enumerate(waiting)]
            eventually(lambda: len(calls) == 4)
            for found in (others, made):
                connection, certificates = link._connection, link._certificates
                install(found, "client", folder, "client")

                def has_moved(was: tuple[object, object] = (connection, certificates)) -> bool:
                    return link._connection is not was[0] and link._certificates is not was[1]

                served = 0
                while served < 3 or not has_moved():
                    x = torch.full((30_000,), float(served), requires_grad=True)
                    worker.double(x).sum().backward()
                    assert x.grad is not None
                    assert x.grad.unique().tolist() == [2.0]
                    served += 1
                assert link._certificates.cert == found.path("client").read_bytes()
                assert carrier_of(link) == carrier
            let_go.set()
            for x, future in zip(waiting, futures, strict=True):
                future.result(SECONDS).sum().backward()
                assert x.grad is not None
                assert x.grad.unique().tolist() == [3.0]
            assert sorted(calls) == [0, 1, 2, 3]
            assert link_of(worker) is link


def test_a_client_stays_with_what_the_worker_takes(
    made: Certificates,
    others: Certificates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """First its files are no certificates, then they are some that the worker does not trust."""
    folder = own_copy(made, tmp_path / "client")
    tls = gw.Tls(made.ca, folder / "client.pem", folder / "client-key.pem")
    with gws.Worker(double, **made.of_server(), tls_client_ca=made.ca) as server:
        with gw.connect(server.address, tls=tls, same_host=False) as worker:
            link = link_of(worker)
            connection = link._connection

            def said(what: str) -> int:
                return sum(what in record.getMessage() for record in caplog.records)

            (folder / "client.pem").write_text("half a certificate")
            eventually(lambda: said("the last good ones stay in use"))
            assert worker.double(21) == 42
            install(others, "client", folder, "client")
            eventually(lambda: said("that with the old ones stays in use: it refuses the certificate"))
            assert worker.double(21) == 42
            assert link._connection is connection
            install(made, "client", folder, "client")
            time.sleep(2.5)  # two looks: what it has is what it had at first, so that nothing is said
            assert worker.double(21) == 42
            assert said("the last good ones stay in use") == said("that with the old ones stays") == 1


def test_after_a_cut_a_client_uses_its_newest_certificate(
    made: Certificates, others: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.transport.grpc_link._LOOK_SECONDS", 3600.0)
    folder = own_copy(made, tmp_path / "client")
    client_ca = tmp_path / "clients.pem"
    shutil.copy(made.ca, client_ca)
    tls = gw.Tls(made.ca, folder / "client.pem", folder / "client-key.pem")
    with gws.Worker(double, **made.of_server(), tls_client_ca=client_ca) as server:
        proxy = FaultyProxy(server.address, kinds=())
        proxy.active = False
        with proxy.running(), gw.connect(proxy.address, tls=tls) as worker:
            client_ca.write_bytes(others.ca.read_bytes())
            install(others, "client", folder, "client")
            proxy.cut_all()
            assert worker.double(21) == 42
            assert link_of(worker)._certificates.cert == others.path("client").read_bytes()


def test_a_worker_that_takes_the_client_no_more_is_lost_with_the_reason(
    made: Certificates, others: Certificates, tmp_path: Path
) -> None:
    client_ca = tmp_path / "clients.pem"
    shutil.copy(made.ca, client_ca)
    with gws.Worker(double, **made.of_server(), tls_client_ca=client_ca) as server:
        proxy = FaultyProxy(server.address, kinds=())
        proxy.active = False
        with proxy.running(), gw.connect(proxy.address, tls=made.tls("client"), lost_after=1.0) as worker:
            client_ca.write_bytes(others.ca.read_bytes())
            proxy.cut_all()
            with pytest.raises(gw.WorkerLost, match="refuses the certificate .*client.pem"):
                worker.double(21)


# -- programs, workers that call others, commands


def health(*args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradwire_server.health", *args]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment)


def test_a_program_need_not_change(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in made.environment("client").items():
        monkeypatch.setenv(name, value)
    with gws.Worker(double, **made.of_server(), tls_client_ca=made.ca) as server:
        with gw.connect(server.address) as worker, gw.connect(server.address, tls=True) as same:
            assert worker.double(21) == 42
            assert link_of(same) is link_of(worker)
    with gws.Worker(double) as server:
        with refused("it speaks no TLS"):
            gw.connect(server.address, connect_timeout=PATIENCE)
        with gw.connect(server.address, tls=False) as worker:
            assert worker.double(21) == 42


def test_a_served_function_calls_other_workers_with_the_certificate_of_its_own(
    launch: Launch, made: Certificates
) -> None:
    flags = [*made.flags(), "--tls-client-ca", str(made.ca)]
    first, second = launch(SERVED, *flags), launch(SERVED, *flags)
    with gw.connect(first.address, tls=made.tls("client")) as worker:
        x = torch.ones(3, requires_grad=True)
        worker.double_at(second.address, x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0] * 3
        with pytest.raises(gw.ConnectFailed, match="it speaks TLS"):
            worker.double_at(second.address, x, tls=False)


def test_a_ref_that_is_passed_on_is_reached_with_tls(launch: Launch, made: Certificates) -> None:
    served = """
    import torch
    import gradwire_server as gws
    gws.expose(torch.nn.Linear)

    @gws.expose
    def applied(layer, x):
        return layer(x)
    """
    flags = [*made.flags(), "--tls-client-ca", str(made.ca), "--follow", "127.0.0.1:*"]
    first, second = launch(served, *flags), launch(served, *flags)
    tls = made.tls("client")
    with gw.connect(first.address, tls=tls) as worker, gw.connect(second.address, tls=tls) as other:
        layer = other.create("Linear", 2, 2)
        x = torch.ones(1, 2)
        assert torch.equal(worker.applied(layer, x), layer(x))


def test_a_daemon_is_set_up_by_its_environment_alone(launch: Launch, made: Certificates) -> None:
    environment = {
        "GRADWIRE_TLS_CERT": str(made.path("server")),
        "GRADWIRE_TLS_KEY": str(made.path("server-key")),
        "GRADWIRE_TLS_CLIENT_CA": str(made.ca),
    }
    daemon = launch(SERVED, env=environment)
    with gw.connect(daemon.address, tls=made.tls("client")) as worker:
        assert worker.double(21) == 42
    check = health(daemon.address, env=environment)
    assert (check.returncode, check.stdout) == (0, f"{daemon.address}: SERVING\n"), check.stderr


def test_a_daemon_with_files_that_cannot_be_used_exits_with_8(made: Certificates, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    command = ("serve", "served", "--bind", "127.0.0.1:0")
    flags = ("--tls-cert", str(made.path("server")), "--tls-key", str(made.path("client-key")))
    done = run("gradwire_server.daemon.cli", *command, *flags, cwd=tmp_path)
    assert done.returncode == 8
    assert f"{made.path('client-key')} is not the key" in done.stderr
    half = run("gradwire_server.daemon.cli", *command, *flags[:2], cwd=tmp_path)
    assert half.returncode == 2
    assert "--tls-cert and --tls-key belong together" in half.stderr


def test_commands_take_options_and_variables(launch: Launch, made: Certificates) -> None:
    daemon = launch(SERVED, *made.flags(), "--tls-client-ca", str(made.ca))
    tls = made.tls("client")
    options = ("--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))
    call = run("gradwire.cli", "call", daemon.address, "double", "21", *options)
    assert (call.returncode, call.stdout) == (0, "42\n"), call.stderr
    for command in (("ping", daemon.address, "-c", "1"), ("ls", daemon.address), ("ps", daemon.address)):
        done = run("gradwire.cli", *command, env=made.environment("client"))
        assert done.returncode == 0, done.stderr
    named = ("--tls-server-name", "localhost")
    assert run("gradwire.cli", "ls", daemon.address, *options, *named).returncode == 0
    refusal = run("gradwire.cli", "ls", daemon.address, "--tls-ca", str(tls.ca))
    assert refusal.returncode == 1
    assert "it takes only clients that have a certificate" in refusal.stderr
    plain = run("gradwire.cli", "ls", daemon.address, "--no-tls", env=made.environment("client"))
    assert plain.returncode == 1
    assert "it speaks TLS" in plain.stderr


def test_a_health_check_takes_options(launch: Launch, made: Certificates, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/worker.sock"
    daemon = launch(SERVED, *made.flags("elsewhere"), "--bind", address)
    options = ("--tls-ca", str(made.ca), "--tls-server-name", "elsewhere.example")
    assert health(daemon.address, *options).returncode == 0
    assert health(daemon.address, *options[:2]).returncode == 1
    assert health(address, *options).returncode == 0
    wrong = health(daemon.address, "--tls-ca", str(tmp_path / "nothing.pem"))
    assert wrong.returncode == 1
    assert "cannot read" in wrong.stderr


def test_a_refused_client_is_told_in_one_line_by_a_command(made: Certificates, others: Certificates) -> None:
    """gRPC's own lines are left out; those of a process that has loaded it before cannot be."""
    with gws.Worker(double, **made.of_server()) as server:
        command = [sys.executable, "-m", "gradwire.cli", "ping", server.address, "--tls-ca", str(others.ca)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "not signed by a CA" in done.stderr


# -- training


def test_training_through_a_network_that_cuts_ends_as_without_one(made: Certificates, tmp_path: Path) -> None:
    """The certificate of the client is replaced meanwhile, too."""
    folder = own_copy(made, tmp_path / "client")
    tls = gw.Tls(made.ca, folder / "client.pem", folder / "client-key.pem")
    generator = torch.Generator().manual_seed(7)
    data = [torch.randn(8, 16, generator=generator, dtype=torch.float64) for _ in range(30)]
    local = torch.nn.Linear(16, 16, dtype=torch.float64)
    head = torch.nn.Linear(16, 1, dtype=torch.float64)
    state, head_state = ({k: v.clone() for k, v in m.state_dict().items()} for m in (local, head))

    def train(model: Any, own: torch.nn.Linear, optimizer: Any, between: Callable[[], None]) -> None:
        for x in data:
            optimizer.zero_grad()
            own(torch.tanh(model(x))).pow(2).mean().backward()
            optimizer.step()
            between()

    def plain() -> torch.optim.Optimizer:
        return torch.optim.SGD([*local.parameters(), *head.parameters()], lr=0.1, momentum=0.9)

    train(local, head, plain(), lambda: None)
    with gws.Worker(torch.nn.Linear, **made.of_server(), tls_client_ca=made.ca) as server:
        proxy = FaultyProxy(server.address, seed=3, bytes_between=(2_000, 20_000))
        proxy.active = False
        with proxy.running(), gw.connect(proxy.address, tls=tls, lost_after=SECONDS) as worker:
            model = worker.create("Linear", 16, 16, dtype=torch.float64)
            model.load_state_dict(state)
            own = torch.nn.Linear(16, 1, dtype=torch.float64)
            own.load_state_dict(head_state)
            optimizer = DistributedOptimizer(
                torch.optim.SGD, [model, *own.parameters()], lr=0.1, momentum=0.9
            )
            proxy.active = True
            steps = iter(range(len(data)))

            def between() -> None:
                if next(steps) % 10 == 5:
                    made.sign("client", "client", serves=False)
                    install(made, "client", folder, "client")

            train(model, own, optimizer, between)
            proxy.active = False
            for name, value in local.state_dict().items():
                assert torch.equal(model.state_dict()[name], value)
            for name, value in head.state_dict().items():
                assert torch.equal(own.state_dict()[name], value)
            assert proxy.fired.total() > 5
