"""Whether a server keeps its word for long and under load: ``python -m loadtest.endurance``."""
