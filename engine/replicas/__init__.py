"""Several engines behind one client: data parallelism (docs/parallel.md).

    requests ─► ReplicaClient ─► Router: which engine has this prompt cached, which is least busy
                     │
                     ├── client ──► engine 0   each the whole model, in a process of its own with
                     ├── client ──► engine 1   its own KV cache, GPUs (or cores) and ranks
                     └── client ──► ...

To callers it looks like a single engine. Nothing here imports the tensor library.
"""
