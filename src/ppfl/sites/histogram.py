"""Scores of clients as a histogram: a sum over clients that says how the worst of them fare."""

import torch
from torch import Tensor

BINS = 512


def histogram(scores: Tensor) -> Tensor:
    """(2, BINS): how many clients have a score in each bin, and the sum of their scores."""
    bins = bin_of(scores)
    counts = torch.bincount(bins, minlength=BINS).double()
    return torch.stack([counts, torch.bincount(bins, weights=scores, minlength=BINS).double()])


def bin_of(scores: Tensor) -> Tensor:
    """Bins that grow with the score: even steps up to 1, where accuracies are, and in powers of 2 above."""
    low, high = scores.clamp(0, 1), scores.clamp_min(1).log2()
    half = BINS // 2
    return torch.where(scores <= 1, (low * (half - 1)).long(), (half + 4 * high).clamp_max(BINS - 1).long())


def worst_tenth(histogram: Tensor, higher_is_better: bool) -> float:
    """Mean score of the tenth of the clients that fares worst, at least of one client."""
    counts, totals = histogram if higher_is_better else histogram.flip(1)
    worst = max(1.0, float(counts.sum() // 10))
    limit = torch.tensor(worst, dtype=counts.dtype)
    taken = torch.minimum(counts.cumsum(0), limit).diff(prepend=counts.new_zeros(1))
    return float((taken * totals / counts.clamp_min(1)).sum() / worst)
