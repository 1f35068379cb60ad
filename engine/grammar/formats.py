"""The formats of strings, as regular expressions for the whole string."""

from __future__ import annotations

# Formats that describe a string's use but not its syntax, from OpenAPI, Google and pydantic.
IGNORED_FORMATS = frozenset({"binary", "directory-path", "enum", "file-path", "password", "path"})

# Those that the grammar library knows itself. RFC 3339 and its appendix A, RFC 1123, RFC 3986,
# RFC 4291, RFC 5321, in a common subset where the standard allows more.
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_CLOCK})"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_DAYS = "([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_{|}~-]+"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9A-Fa-f]{1,4}"
_URI_CHAR = "([A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
KNOWN_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|[0-9]+W)",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"{_HEX}(:{_HEX}){{7}}|"
    + "|".join(
        f"({_HEX}(:{_HEX}){{0,{left}}})?::({_HEX}(:{_HEX}){{0,{5 - left}}})?" for left in range(6)
    ),
    "uri": f"[A-Za-z][A-Za-z0-9+.-]*:{_URI_CHAR}*(#{_URI_CHAR}*)?",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}

# Others: pydantic's, of types such as UUID4 and Base64Bytes, and OpenAPI's byte.
_BASE64 = "([{0}]{{4}})*([{0}]{{2}}==|[{0}]{{3}}=)?"
OTHER_FORMATS = {
    "base64": _BASE64.format("A-Za-z0-9+/"),
    "base64url": _BASE64.format("A-Za-z0-9_-"),
    "byte": _BASE64.format("A-Za-z0-9+/"),
    **{
        f"uuid{version}": (
            f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}"
            "-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
        )
        for version in range(1, 9)
    },
}
ALL_FORMATS = KNOWN_FORMATS | OTHER_FORMATS
