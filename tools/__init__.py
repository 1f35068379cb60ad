"""Offline tools around the engine; no HTTP."""
