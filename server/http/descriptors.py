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


def raise_limit() -> None:
    """Raise the soft limit to the hard one, which needs no privilege.

    The usual soft limit, 1,024, is for the sake of programs that call ``select``. Child processes
    inherit the raised one.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS refuses "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """How many connections may be open; at least half the descriptors are for them."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - min(_RESERVED, limit // 2)
