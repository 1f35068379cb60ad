"""Batches: files of requests answered in idle capacity, surviving restarts.

    create ─► validating ─► in_progress ─► finalizing ─► completed | expired
                  │   │          │
                failed └─► cancelling ─► cancelled          (a full disk: failed, from anywhere)

``lines`` reads and validates the input, ``line_execution`` runs one line, ``run`` takes one batch
through its statuses, and ``runner`` looks for batches that no process is working on.
"""
