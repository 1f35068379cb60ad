"""How many connections the process's limit of open descriptors (``ulimit -n``) leaves room for.

Without a bound, clients take the last descriptor, and then everything fails that needs one: an
engine to be restarted, a template to be rendered, a database to be opened.
"""

from __future__ import annotations

import contextlib
import resource
import sys

# For what the server opens besides connections: its databases and logs, the engine's sockets, the
# sandboxes' pipes, downloads of images. An idle server has 17 open.
_RESERVED = 64
# Some systems allow a billion, and some programs close each one before they start.
_MAX_LIMIT = 2**20


def raise_limit() -> None:
    """Raise the soft limit to the hard one, which needs no privilege.

    The usual soft limit, 1,024, is for the sake of programs that call ``select``. Child processes
    inherit the raised one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # the system may have a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def max_connections() -> int:
    """How many connections may be open; at least half the descriptors are for them."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(_RESERVED, limit // 2)
