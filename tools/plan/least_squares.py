"""Non-negative least squares."""

from __future__ import annotations

import numpy as np


def solve_non_negative(terms: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The non-negative coefficients of ``terms`` that best fit ``target``, by least squares."""
    active = list(range(terms.shape[1]))
    while True:
        size = np.linalg.norm(terms[:, active], axis=0)
        size[size == 0] = 1.0
        factors = np.linalg.lstsq(terms[:, active] / size, target, rcond=1e-10)[0] / size
        worst = int(np.argmin(factors))
        if factors[worst] >= 0:
            break
        del active[worst]
    result = np.zeros(terms.shape[1])
    result[active] = factors
    return result
