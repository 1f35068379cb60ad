"""Tensor parallelism: one model on several devices, a process for each (docs/parallel.md).

    engine process, rank 0                       rank 1, 2, ... (follower.py)
    scheduler ─ runner ─ leader.py ── frames ──►  the same layers over their own share
                  │                                │
                  └──────── group.py: all-reduce, broadcast, gather ──┘

Ranks of other machines come by themselves: ``gathering.py`` takes them in, ``node.py`` is their
side, ``handshake.py`` and ``agreement.py`` say who is taken, ``board.py`` how ranks then find each
other.

``shard.py`` says what a rank has of each parameter, ``refusals.py`` what cannot be shared out,
``layers.py`` what stands where ranks need one another.
"""
