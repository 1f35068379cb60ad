"""Speculative decoding: drafting tokens, so that one step of the model verifies several.

    proposer ─► drafts ─► rows of several tokens ─► the runner keeps those that it would have chosen
       ▲                                                        │
       └──── how many pay for themselves ◄──────────────────────┘

See Leviathan et al. 2023. Drafts change when a token is generated, not which one: the output is
what the model would have generated without them. With rejection sampling it is another sample of
the same distribution (``engine/runner/verification.py``).
"""
