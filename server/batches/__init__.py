"""Batches: files of requests that are answered when nobody else waits, whatever happens meanwhile.

    create ─► validating ─► in_progress ─► finalizing ─► completed | expired
                  │   │          │
                failed └─► cancelling ─► cancelled          (a full disk: failed, from anywhere)

``lines`` reads and judges the input, ``answering`` makes one line's answer, ``run`` takes one
batch through its statuses, and ``runner`` looks for batches that nobody takes care of.
"""
