"""An indexer's selection in float64, and its margin."""

import numpy as np


def scores(q, weights, keys):
    """Scores [T, rows] of queries q [T, heads, D] with weights of heads [T, heads], and keys [rows, D]."""
    return np.einsum("th,thn->tn", weights, np.maximum(np.einsum("thd,nd->thn", q, keys), 0))


def best(row, count):
    """Indices of the largest scores, in ascending order; of equal scores the lowest indices."""
    return np.sort(np.argsort(-row, kind="stable")[:count])


def best_of_blocks(row, size):
    """The best score of each block of `size` rows; the newest block is always a candidate."""
    padded = np.full(-(-len(row) // size) * size, -np.inf)
    padded[: len(row)] = row
    found = padded.reshape(-1, size).max(axis=1)
    found[-1:] = np.inf
    return found


def margin(row, count):
    """Difference between the lowest selected and the highest other score; infinity if all are selected."""
    order = np.sort(row)[::-1]
    return np.inf if len(row) <= count else order[count - 1] - order[count]


def gap(row, chosen, count):
    """Distance of the lowest selected score below the highest other one, in standard deviations of the scores.

    Infinity unless all rows are selected, or `count` if there are more, each once and in ascending order.
    """
    if len(chosen) != min(count, len(row)) or not np.all(np.diff(chosen) > 0) or not np.all(chosen < len(row)):
        return float("inf")
    others = np.delete(row, chosen)
    below = float(others.max() - row[chosen].min()) if len(others) else 0.0
    return below / float(row.std()) if below > 0 else 0.0
