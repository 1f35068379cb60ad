from tests.matrix_units import matrix_units  # noqa: F401
