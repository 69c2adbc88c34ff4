"""Every client's personal model on its own data, at a site.

Scores leave a site as sums over its clients: also the worst tenth, which comes from a histogram. Each client's own
scores are rows, for runs that ask for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.local.batches import Draws, LocalData, similar_sizes
from ..core.backends import Backend, Batch
from ..core.losses import Loss
from ..core.population import Models
from ..data import Samples
from .histogram import histogram
from .metrics import KeptPredictions

BLOCK_BYTES = 16 * 2**20


class ClientScores(NamedTuple):
    """One number per client."""

    loss: Tensor  # (N,), mean over samples
    score: Tensor  # (N,), mean over samples: accuracy for classifiers
    samples: Tensor  # (N,)


def score_clients(
    backend: Backend,
    samples: Samples,
    models_of: Callable[[Tensor], Models],
    weight: Tensor,
    keys: Tensor,
    hard: bool,
    among: Tensor,
    predictions: KeptPredictions | None = None,
) -> ClientScores:
    """Loss and score of the clients at the positions `among` on their own samples. models_of: of such clients.

    `predictions` collects those of all samples, for metrics that need them together.
    """
    sums = torch.zeros(3, len(among), dtype=torch.float64)
    for which, models, batches in _blocks(backend, samples, models_of, weight, keys, among):
        chosen = models.hardened() if hard else models
        for batch in batches:
            n = len(batch.x)
            prediction, loss = backend.evaluate(chosen.first(n), batch.x, batch.y)
            score = backend.loss.score(prediction.flatten(0, 1), batch.y.flatten(0, 1)).reshape(batch.share.shape)
            means = torch.stack([loss * batch.share, score * batch.share, batch.share]).sum(dim=2)
            sums[:, which[:n]] += (means * batch.real).double().cpu()
            if predictions is not None:
                predictions.add(which[:n], prediction, batch.y, batch.real)
    loss, score = sums[:2] / sums[2].clamp_min(1)
    return ClientScores(loss, score, sums[2])


def score_sums(scores: ClientScores, importance: Tensor, loss: Loss) -> dict[str, Tensor]:
    """What is reported of all clients together; a client whose loss is not finite is only counted."""
    scored = scores.samples > 0
    finite = scored & scores.loss.isfinite() & scores.score.isfinite()
    values, n = loss.metric(scores.score[finite]), scores.samples[finite]
    return {
        "loss": (scores.loss[finite] * n).sum(),
        "score": (scores.score[finite] * n).sum(),
        "samples": n.sum(),
        "clients": finite.sum().double(),
        "client_score": scores.score[finite].sum(),
        "metric": values.sum(),
        "metric_squared": values.square().sum(),
        "importance": importance[finite].double().sum(),
        "importance_loss": (importance[finite].double() * scores.loss[finite]).sum(),
        "not_finite": (scored & ~finite).sum().double(),
        "histogram": histogram(scores.score[finite]),
    }


def _blocks(
    backend: Backend,
    samples: Samples,
    models_of: Callable[[Tensor], Models],
    weight: Tensor,
    keys: Tensor,
    among: Tensor,
) -> Iterator[tuple[Tensor, Models, Iterator[Batch]]]:
    """Blocks of clients of similar size, as positions in `among`, with the models and samples that belong to them.
    Networks that run one client at a time gain nothing from a block, and would run its padding: they have blocks of
    one client."""
    sizes = samples.cpu_sizes[among]
    sample = samples.bytes_per_sample + backend.output_bytes
    per_client = int(sizes.max()) * sample + backend.population.bytes_of_local_run
    most = 1 if backend.clients.one_by_one else max(1, BLOCK_BYTES // per_client)
    largest_first = sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]
    for run in similar_sizes(sizes[largest_first], most):
        which = largest_first[run]
        with backend.space.frame():
            who = among[which]
            at = who.to(weight.device)
            data = LocalData(samples, weight[at], keys[who], who, Draws(0, 0), backend.space)
            yield which, models_of(who), data.everything(block=max(1, BLOCK_BYTES // (sample * len(who))))
