"""One model on several devices, a process for each (docs/parallel.md).

    engine process, rank 0                       rank 1, 2, ... (follower.py)
    scheduler ─ runner ─ leader.py ── frames ──►  the same layers over their own share,
                  │                                │  or other layers
                  └──────── group.py: all-reduce, broadcast, gather; send, receive ──┘

Ranks of other machines come by themselves: ``gathering.py`` takes them in, ``node.py`` is their
side, ``handshake.py`` and ``agreement.py`` say who is taken, ``board.py`` how ranks then find each
other.

Tensor parallelism: ``shard.py`` says what a rank has of each parameter, ``layers.py`` what stands
where ranks need one another. Pipeline parallelism: ``stages.py`` says which layers a stage has,
``pipeline.py`` how a step goes through all of them. ``refusals.py`` says what cannot be shared out.

Sleep and other weights: ``resting.py`` is rank 0's side, ``seat.py`` that of the others.
"""
