"""Speculative decoding: drafting tokens, so that one step of the model verifies several.

    proposer ─► drafts ─► rows of several tokens ─► the runner keeps those that it would have chosen
       ▲                                                        │
       └──── how many pay for themselves (pace) ◄───────────────┘

See Leviathan et al. 2023. Drafts change when a token is generated, never which one: the output is
what the model would have generated without them.
"""
