"""Why a TLS connection cannot be had. gRPC often says no more than that the socket was closed.

A short handshake of our own finds out. Only what waiting cannot mend counts as a refusal: a connection that
is cut, or cannot be opened, may succeed later.
"""

from __future__ import annotations

import socket
import ssl
import time

from gradwire.system.certificates import Certificates

__all__ = ["refusal", "speaks_tls"]

Address = tuple[str, int] | str
"""Of a TCP port, or the path of a unix socket."""

_TIMES = 2
"""How often a handshake has to end in the same way: a proxy may cut any connection at any byte."""
_HTTP2 = "h2"

_UNKNOWN_ISSUER = (18, 19, 20, 21)
_NOT_YET_VALID, _EXPIRED = 9, 10
_WRONG_NAME = (62, 64)
"""Codes of OpenSSL, `X509_V_ERR_...`."""


class _Refused(Exception):
    """The other end will never take the connection; the message says why."""


class _Closed(Exception):
    """The other end closed the connection after our part of the handshake."""


def refusal(address: Address, name: str, certificates: Certificates, seconds: float) -> str | None:
    """Why a worker at this address will never take a TLS connection of a process with these certificates;
    None if it may. `name` is that for which its certificate has to be."""
    give_up_at = time.monotonic() + seconds
    try:
        if all(_is_refused_as_a_client(address, name, certificates, give_up_at) for _ in range(_TIMES)):
            return _client_refusal(certificates)
    except _Refused as refused:
        return str(refused)
    return None


def _is_refused_as_a_client(
    address: Address, name: str, certificates: Certificates, give_up_at: float
) -> bool:
    """Whether the worker closes the connection because of the certificate of this process, or because it has
    none.

    gRPC closes the connection without a word then. With TLS 1.3 this process has finished its handshake by
    that time, and with TLS 1.2 it has not.
    """
    context = certificates.ssl_context()
    try:
        _shake_hands(address, name, context, give_up_at)
        return False
    except _Closed:
        pass
    except OSError:
        return False
    context = certificates.ssl_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        _shake_hands(address, name, context, give_up_at)
        return False
    except _Closed:
        return False
    except (ssl.SSLEOFError, ConnectionResetError):
        return True
    except OSError:
        return False


def _shake_hands(address: Address, name: str, context: ssl.SSLContext, give_up_at: float) -> None:
    """Returns if the other end takes the connection. Raises _Refused, _Closed, or OSError for everything that
    may pass."""
    context.set_alpn_protocols([_HTTP2])
    with _connected(address, give_up_at) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=name) as secured:
                if secured.selected_alpn_protocol() != _HTTP2:
                    raise _Refused("it speaks TLS, but not HTTP/2, so it is no gradwire worker")
                try:
                    is_open = bool(secured.recv(1))  # a gRPC server begins, with its settings
                except (ssl.SSLEOFError, ConnectionResetError):
                    is_open = False
                if not is_open:
                    raise _Closed
        except ssl.SSLCertVerificationError as error:
            raise _Refused(_server_refusal(error, name)) from None
        except ssl.SSLError as error:
            reason = error.reason or ""
            if isinstance(error, ssl.SSLEOFError):
                raise
            if "ALERT" in reason:
                raise _Refused(f"it refuses the TLS handshake ({reason.replace('_', ' ').lower()})") from None
            if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
                raise _Refused(
                    "it speaks no TLS: start it with --tls-cert and --tls-key, or connect without TLS "
                    "(tls=False, and no GRADWIRE_TLS_ variables)"
                ) from None
            raise


def speaks_tls(address: Address, seconds: float) -> bool:
    """Whether a TLS server listens at this address. It may be one that takes no connection of this
    process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([_HTTP2])
    try:
        with _connected(address, time.monotonic() + seconds) as connection:
            with context.wrap_socket(connection):
                return True
    except OSError:
        return False


def _connected(address: Address, give_up_at: float) -> socket.socket:
    seconds = max(give_up_at - time.monotonic(), 0.1)
    if not isinstance(address, str):
        return socket.create_connection(address, seconds)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _server_refusal(error: ssl.SSLCertVerificationError, name: str) -> str:
    code = error.verify_code
    if code in _UNKNOWN_ISSUER:
        return (
            "its certificate was not signed by a CA that this process trusts: give the CA of the worker "
            "(tls=gw.Tls(ca=...), --tls-ca or GRADWIRE_TLS_CA)"
        )
    if code == _EXPIRED:
        return "its certificate has expired: renew the file there, which needs no restart"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet: compare the clocks of both machines"
    if code in _WRONG_NAME:
        return (
            f"its certificate is not for {name!r}: connect by a name that is in it, or say which one that is "
            "(tls=gw.Tls(server_name=...), --tls-server-name or GRADWIRE_TLS_SERVER_NAME)"
        )
    return f"its certificate cannot be trusted: {error.verify_message}"


def _client_refusal(certificates: Certificates) -> str:
    if certificates.files.cert is None:
        return (
            "it takes only clients that have a certificate: give one (tls=gw.Tls(cert=..., key=...), "
            "--tls-cert and --tls-key, or GRADWIRE_TLS_CERT and GRADWIRE_TLS_KEY)"
        )
    return (
        f"it refuses the certificate {certificates.files.cert} of this process, which has expired, was not "
        "signed by a CA in the file of its --tls-client-ca, or is not one for clients"
    )
