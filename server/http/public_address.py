"""The address at which a client sees the server, which a proxy in front of it tells.

Only a trusted proxy is believed: one on this machine, or of ``--trusted-proxy``. Others could make
links in answers that lead elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.requests import Request

_HOST = re.compile(r"[A-Za-z0-9._\-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_PREFIX = re.compile(r"(/[A-Za-z0-9._~\-]+)*/?")


def public_address(request: Request, trusted_proxies: Sequence[str]) -> str:
    """The URL of the server's root as the client wrote it, without a slash at its end.

    A trusted proxy's X-Forwarded-Proto, X-Forwarded-Host and X-Forwarded-Prefix go before what the
    request itself says. Of several values, the first is that of the proxy next to the client.

    Args:
        request: of the client, or of a proxy for it.
        trusted_proxies: addresses and networks besides the loopback ones; ``*`` is all.
    """
    base = request.base_url
    scheme, host, prefix = base.scheme, base.netloc, base.path.rstrip("/")
    peer = None if request.client is None else request.client.host
    if peer is not None and _is_trusted(peer, trusted_proxies):
        told_scheme = _forwarded(request, "proto").lower()
        told_host = _forwarded(request, "host")
        told_prefix = _forwarded(request, "prefix")
        scheme = told_scheme if told_scheme in ("http", "https") else scheme
        host = told_host if _HOST.fullmatch(told_host) else host
        prefix = told_prefix.rstrip("/") if _PREFIX.fullmatch(told_prefix) else prefix
    return f"{scheme}://{host}{prefix}"


def _forwarded(request: Request, what: str) -> str:
    return request.headers.get(f"x-forwarded-{what}", "").partition(",")[0].strip()


def _is_trusted(peer: str, trusted: Sequence[str]) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or any(
        each == "*" or address in ipaddress.ip_network(each, strict=False) for each in trusted
    )
