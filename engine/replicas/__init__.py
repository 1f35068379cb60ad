"""Several engines behind one client: data parallelism (docs/parallel.md).

    requests ─► ReplicaClient ─► Router: which engine has this prompt cached, which is least busy
                     │
                     ├── client ──► engine 0   each the whole model, in a process of its own with
                     ├── client ──► engine 1   its own KV cache, GPUs (or cores) and ranks
                     └── client ──► ...

To whoever submits requests this is an engine like another. Nothing here imports the tensor library.
"""
