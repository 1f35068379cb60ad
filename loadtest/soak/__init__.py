"""Whether answers stay what they are where everything meets: ``python -m loadtest.soak``."""
