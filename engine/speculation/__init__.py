"""Guessing tokens ahead, so that one step of the model verifies several (Leviathan et al. 2023).

    proposer ─► drafts ─► rows of several tokens ─► the runner keeps those that it would have chosen
       ▲                                                        │
       └──── how many pay for themselves (pace) ◄───────────────┘

A draft changes when a token comes, never which: what is told is what the model would have said.
"""
