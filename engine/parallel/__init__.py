"""One model on several devices, with one process for each (docs/parallel.md).

    engine process, rank 0                       rank 1, 2, ... (follower.py)
    scheduler ─ runner ─ leader.py ── frames ──►  the same layers over their own shard,
                  │                                │  or other layers
                  └──────── group.py: all-reduce, broadcast, gather; send, receive ──┘

``rank_links.py`` carries rank 0's frames and the answers to them.

Ranks on other machines connect by themselves: ``rank_listener.py`` accepts them and ``node.py`` is
their side; ``handshake.py`` and ``compatibility.py`` decide who is accepted, and through
``store.py`` the ranks then find each other.

Tensor parallelism: ``shard.py`` defines a rank's shard of each parameter, ``layers.py`` the layers
that communicate. Pipeline parallelism: ``stages.py`` assigns layers to stages, ``pipeline.py``
moves a step through them. ``sharding_support.py`` lists what cannot be sharded.

Sleep and weight exchange: ``sleeping.py`` is rank 0's side, ``follower_worker.py`` that of the
others.
"""
