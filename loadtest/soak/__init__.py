"""Tests that answers stay the same with all features combined: ``python -m loadtest.soak``."""
