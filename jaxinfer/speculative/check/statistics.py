"""Chi-square tests of what sampling yields, where a law is too large to be enumerated."""

import numpy as np
from scipy.special import gammaincc

SMALLEST_EXPECTED = 5.0
"""Cells in which fewer samples are expected are counted together."""


def goodness_of_fit(count_X: np.ndarray, law_X: np.ndarray) -> float:
    """Probability of a deviation at least as large, if the samples follow the law (Pearson).

    Args:
        count_X: how often each outcome was drawn.
        law_X: its probability. An outcome without any that was drawn gives 0.
    """
    count_X, law_X = count_X.ravel(), law_X.ravel()
    if count_X[law_X == 0].any():
        return 0.0
    expected_X = count_X.sum() * law_X
    common_X = expected_X >= SMALLEST_EXPECTED
    observed = np.append(count_X[common_X], count_X[~common_X].sum())
    expected = np.append(expected_X[common_X], expected_X[~common_X].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return _p_value(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def same_law(first_X: np.ndarray, second_X: np.ndarray) -> float:
    """The same for two samples, if they have one law, whatever it is."""
    common_X = first_X + second_X >= 2 * SMALLEST_EXPECTED
    table = np.array([np.append(x[common_X], x[~common_X].sum()) for x in (first_X, second_X)], float)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    return _p_value(float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1)


def _p_value(statistic: float, degrees: int) -> float:
    return float(gammaincc(degrees / 2, statistic / 2)) if degrees > 0 else 1.0
