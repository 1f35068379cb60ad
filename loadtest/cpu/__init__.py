"""Quire's CPU benchmark against its peers: ``python -m loadtest.cpu``, or ``make bench-cpu``."""
