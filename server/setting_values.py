"""Parsing of values, the same for flags, environment and YAML."""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from engine.config import Dtype

_SCALES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", start=1)},
    **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)},
    **{f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", start=1)},
}

_DTYPES = {"half": "float16", "float": "float32"}
_MAX_NAME = 256  # of a model; a request may name no longer one


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can connect to that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_number(value: Any) -> Any:
    """``"2GiB"`` -> 2147483648, ``"8K"`` -> 8192, ``"8k"`` -> 8000; other types unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([kmgtKMGT]?|[KMGT]i?B)", value.strip())
    if match is None:
        raise ValueError("must be a number such as 4096, 8K or 2GiB")
    return round(Decimal(match[1]) * _SCALES[match[2]])


def _read_dtype(value: Any) -> Any:
    """The two aliases that PyTorch and vLLM have; anything else unchanged."""
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _read_length(value: Any) -> Any:
    """None, the default, for what stands for it in vLLM; anything else unchanged."""
    return None if value in ("auto", "-1", -1) else value


def _read_list(value: Any) -> Any:
    """``"a,b"`` -> ``["a", "b"]``; anything else unchanged."""
    if isinstance(value, str):
        return [item for item in (part.strip() for part in value.split(",")) if item]
    return value


def _check_adapters(rows: list[str]) -> list[str]:
    """Validate rows of ``NAME=DIRECTORY``; names must be unique."""
    names = [row.partition("=")[0] for row in rows]
    for row, name in zip(rows, names, strict=True):
        if not name or row == name or row.endswith("="):
            raise ValueError("must be NAME=DIRECTORY")
    if len(set(names)) < len(names):
        raise ValueError("names an adapter twice")
    return rows


def _read_keys(value: Any) -> Any:
    """A list as any other, but no empty one by mistake: without a key everybody may come in."""
    keys = _read_list(value)
    if isinstance(value, str) and not keys:
        raise ValueError("must not be empty")
    return keys


def _check_key(key: str) -> str:
    """A key as a bearer token can carry it."""
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError("must be visible ASCII characters, without spaces, at least one")
    return key


def _check_name(name: str) -> str:
    """A model's name that clients can ask for."""
    if not name.strip() or not name.isprintable() or len(name) > _MAX_NAME:
        raise ValueError(f"must be a name of 1 to {_MAX_NAME} printable characters")
    return name


def _check_host(host: str) -> str:
    """An address; to the system, an empty one means all that there are."""
    if not host.strip():
        raise ValueError("must be an address, such as 127.0.0.1, or 0.0.0.0 for all of them")
    return host


def _check_origin(origin: str) -> str:
    """What a browser sends as Origin, or any."""
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
        raise ValueError("must be an origin, such as https://app.example, or *")
    return origin


def _check_proxy(proxy: str) -> str:
    """An address or a network, or all."""
    try:
        return proxy if proxy == "*" else str(ipaddress.ip_network(proxy, strict=False))
    except ValueError:
        raise ValueError(
            "must be an address such as 10.0.0.2, a network such as 10.0.0.0/8, or *"
        ) from None


def _check_prefix(prefix: str) -> str:
    """The beginning of a name that Prometheus takes."""
    if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
        raise ValueError("must be letters, digits and underscores, and not begin with a digit")
    return prefix


def _check_endpoint(url: str) -> str:
    """Validate a URL to connect to."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # from the port, or from brackets
        is_url = False
    if not is_url or re.search(r"[\s?#]", url):
        raise ValueError("must be a URL such as http://localhost:4318")
    return url


ScaledInt = Annotated[int, BeforeValidator(_read_number)]
Length = Annotated[Annotated[ScaledInt, Field(ge=1)] | None, BeforeValidator(_read_length)]
NumberFormat = Annotated[Dtype, BeforeValidator(_read_dtype)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
Host = Annotated[str, AfterValidator(_check_host)]
MetricsPrefix = Annotated[str, AfterValidator(_check_prefix)]
NameList = Annotated[list[Annotated[str, AfterValidator(_check_name)]], BeforeValidator(_read_list)]
KeyList = Annotated[list[Annotated[str, AfterValidator(_check_key)]], BeforeValidator(_read_keys)]
AdapterList = Annotated[list[str], BeforeValidator(_read_list), AfterValidator(_check_adapters)]
OriginList = Annotated[
    list[Annotated[str, AfterValidator(_check_origin)]], BeforeValidator(_read_list)
]
ProxyList = Annotated[
    list[Annotated[str, AfterValidator(_check_proxy)]], BeforeValidator(_read_list)
]
