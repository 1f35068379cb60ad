"""Offline jobs around the engine; no HTTP."""
