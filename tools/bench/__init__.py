"""Benchmarks of the engine in this process: steps, whole batches, the first answer.

``python -m tools.bench`` runs everything that checks a GPU, each part in a process of its own with
a time limit. ``python -m tools.bench.steps`` and its neighbours run one part.
"""
