"""LoRA (Hu et al. 2021): small differences to a model's linear layers, several in one batch.

    PEFT directory ──peft.py──► Adapter weights, on the host ──store.py──► slots on the device
                                                                              │
    a step's rows, each with an adapter or none ──batch.py──► grouped products beside each layer

A layer computes ``W x`` for all rows as ever; what an adapter adds, ``B A x * scale``, is added for
the rows that asked for it. Keys and values depend on the adapter, so the prefix cache keeps the
prefixes of different adapters apart.
"""
