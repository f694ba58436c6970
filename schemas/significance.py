"""How surely numbers of many heads are above something: Student's t, and false ones among many."""

import math

import numpy as np


def p_above(
    means: np.ndarray, errors: np.ndarray, degrees_of_freedom: float, margin: float
) -> np.ndarray:
    """How likely a mean this large is if the true one is no larger than the margin: one-sided p of
    Student's t: `[layer head]`. NaN without an error.
    """
    above = means - margin
    with np.errstate(divide="ignore", invalid="ignore"):
        t = above / errors
    one_sided = student_tail(np.abs(np.where(np.isfinite(t), t, 0)), degrees_of_freedom) / 2
    p = np.where(t >= 0, one_sided, 1 - one_sided)
    # Documents that all say the same.
    p = np.where(errors == 0, np.where(above > 0, 0.0, 1.0), p)
    return np.where(np.isnan(errors), np.nan, p)


def student_tail(t: np.ndarray, df: float) -> np.ndarray:
    """P(|T| > t) for t ≥ 0, by the integral of the macro of this name in
    queries/open/internal/macros.sql, which a query of its own would take a tenth of a second for.
    """
    r = max(df, 1) - 0.5
    low = np.sqrt(r * np.log1p(t**2 / (r + 0.5)))
    high = np.sqrt(low**2 + 24)
    places, weights = np.polynomial.legendre.leggauss(8)  # [point]
    y = low[..., None] + (high - low)[..., None] * (places + 1) / 2
    density = np.exp(-(y**2) / 2) * y / np.sqrt(2 * r * np.sinh(y**2 / (2 * r)))
    integral = (density * weights).sum(-1) * (high - low) / 2
    scale = math.exp(math.lgamma((r + 1.5) / 2) - math.lgamma((r + 0.5) / 2))
    return np.minimum(1, 2 * scale / math.sqrt(math.pi * r) * integral)


def q_of(p: np.ndarray) -> np.ndarray:
    """Benjamini and Hochberg's q of every p: the share of false ones among all with this p or less.

    q_i = min over j with p_j ≥ p_i of p_j m / #{k: p_k ≤ p_j}; NaN where p is.

    >>> q_of(np.array([0.01, 0.04, 0.03, np.nan, 0.8])).tolist()
    [0.04, 0.05333333333333334, 0.05333333333333334, nan, 0.8]
    """
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p.ravel()[known], kind="stable")]
    raised = p.ravel()[order] * len(order) / np.arange(1, len(order) + 1)
    q = np.full(p.size, np.nan)
    # From the largest p down, the smallest so far.
    q[order] = np.minimum.accumulate(raised[::-1])[::-1]
    return q.reshape(p.shape)
