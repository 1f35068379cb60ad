"""Mutual authentication of machines by a shared secret.

    listener ──► greeting, nonce A                      48 bytes
    dialer   ──► nonce B, HMAC(secret, "dialer" A B)    64 bytes
    listener ──► HMAC(secret, "listener" A B)           32 bytes, zeros if the dialer failed

All three messages have a fixed length, so nothing is parsed before both sides are authenticated,
and a peer that merely connects receives no MAC to attack offline. What follows on the connection is
neither encrypted nor authenticated: it belongs on a private network, as do the tensors between
ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from pathlib import Path

from engine.errors import ModelLoadError

MIN_SECRET_BYTES = 16
HANDSHAKE_TIMEOUT_S = 10.0  # in total
_GREETING = b"quire node v1\n\0\0"
_NONCE_BYTES = 32
_MAC_BYTES = hashlib.sha256().digest_size
# A machine that loses power or its cable does not close its connections.
_IDLE_S, _INTERVAL_S, _PROBES, _UNACKNOWLEDGED_MS = 10, 5, 4, 30_000


class HandshakeError(Exception):
    """The peer does not know the secret or is not a node of ours; a one-line message."""


class WrongSecret(HandshakeError):
    """The peer has a different secret."""


def read_secret(path: str) -> bytes:
    """Read a secret file, without surrounding white space.

    Raises:
        ModelLoadError: it cannot be read, or could be guessed; one line.
    """
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ModelLoadError(f"node_secret_file {path}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ModelLoadError(
            f"node_secret_file {path}: a secret has {MIN_SECRET_BYTES} bytes or more, this one "
            f"{len(secret)}; `openssl rand -hex 32` makes one"
        )
    return secret


def authenticate_as_listener(connection: socket.socket, secret: bytes) -> None:
    """Authenticate as the listener. Raises HandshakeError or OSError."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.sendall(_GREETING + ours)
    theirs = _receive(connection, _NONCE_BYTES, deadline_s)
    code = _receive(connection, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(code, _mac(secret, b"dialer", ours, theirs)):
        connection.sendall(bytes(_MAC_BYTES))
        raise WrongSecret("it does not know the secret")
    connection.sendall(_mac(secret, b"listener", ours, theirs))
    connection.settimeout(None)


def authenticate_as_dialer(connection: socket.socket, secret: bytes) -> None:
    """Authenticate as the dialer. Raises HandshakeError or OSError."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    if _receive(connection, len(_GREETING), deadline_s) != _GREETING:
        raise HandshakeError("it is no node of this version of Quire")
    theirs = _receive(connection, _NONCE_BYTES, deadline_s)
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _mac(secret, b"dialer", theirs, ours))
    code = _receive(connection, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(code, _mac(secret, b"listener", theirs, ours)):
        raise WrongSecret("it has another secret")
    connection.settimeout(None)


def configure_socket(connection: socket.socket) -> None:
    """Make a TCP connection send small frames at once, and detect a silent peer within half a
    minute.

    The latter works with and without unacknowledged data.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S),
        ("TCP_KEEPINTVL", _INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, name):  # some exist only on Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _mac(secret: bytes, role: bytes, listener_nonce: bytes, dialer_nonce: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + listener_nonce + dialer_nonce, "sha256")


def _receive(connection: socket.socket, size: int, deadline_s: float) -> bytes:
    """Receive exactly ``size`` bytes. Raises HandshakeError if they do not come."""
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            data = connection.recv(size - len(received))
        except TimeoutError:
            raise HandshakeError("it says nothing") from None
        if not data:
            raise HandshakeError("it has hung up")
        received += data
    return received
