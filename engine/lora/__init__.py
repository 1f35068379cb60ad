"""LoRA adapters (Hu et al. 2021): small additions to linear layers, several in one batch.

    PEFT directory ──peft.py──► Adapter weights, on the host ──store.py──► slots on the device
                                                                              │
    a step's rows, each with an adapter or none ──batch.py──► grouped products beside each layer

A layer computes ``W x`` for all rows as usual. An adapter's contribution, ``B A x * scale``, is
added for the rows that use it. Keys and values depend on the adapter, so the prefix cache separates
the prefixes of different adapters.
"""
