"""TLS on the listening socket, optionally with client certificates."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from server.setting_sources import InvalidSettings
from server.settings import Settings

_log = logging.getLogger(__name__)


class Tls:
    """The server's certificate, and the client certificates it accepts.

    Args:
        certificate: PEM file of the certificate and its intermediates.
        key: PEM file of its key, without a passphrase; None if it is in the same file.
        client_authorities: PEM file of CA certificates, one of which must have signed a client's;
            None requests no client certificates.

    Raises:
        InvalidSettings: a file cannot be used.
    """

    def __init__(
        self, certificate: Path, key: Path | None = None, client_authorities: Path | None = None
    ) -> None:
        self._certificate = certificate
        self._key = key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and up
        self._load()
        if client_authorities is not None:
            try:
                self.context.load_verify_locations(client_authorities)
            except (OSError, ssl.SSLError) as error:
                raise InvalidSettings(
                    _file_error("--ssl-ca-certs", client_authorities, error)
                ) from None
            self.context.verify_mode = ssl.CERT_REQUIRED

    @classmethod
    def of(cls, settings: Settings) -> Tls | None:
        """The TLS that the settings ask for; None means plain HTTP. Raises InvalidSettings."""
        if settings.ssl_certfile is None:
            for flag, value in (
                ("--ssl-keyfile", settings.ssl_keyfile),
                ("--ssl-ca-certs", settings.ssl_ca_certs),
            ):
                if value is not None:
                    raise InvalidSettings(f"{flag} needs --ssl-certfile")
            return None
        return cls(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)

    def reload(self) -> None:
        """Read the files again; new connections get the new certificate."""
        try:
            self._load()
        except InvalidSettings as error:
            _log.error("keeping the current certificate: %s", error)

    def _load(self) -> None:
        # With an empty passphrase, a key that needs one is an error and not a prompt.
        try:
            self.context.load_cert_chain(self._certificate, self._key, password="")
        except (OSError, ssl.SSLError) as error:
            where = self._certificate if self._key is None else f"{self._certificate}, {self._key}"
            raise InvalidSettings(_file_error("--ssl-certfile", where, error)) from None


def _file_error(flag: str, where: object, error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return f"{flag}: cannot use {where}: {str(reason or error).lower().replace('_', ' ')}"
