"""Tests that a server stays correct under long, heavy load: ``python -m loadtest.endurance``."""
