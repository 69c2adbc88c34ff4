"""The paper's own algorithm: federated rounds of block coordinate descent, in which clients keep their data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...algorithms import PPFL
from ...core.affinity import Affinity
from ...core.population import Population
from ...core.trees import Params
from ...data import Federation
from ...errors import SettingError
from ...networks.plain import PartlySharedLinear
from ...server import Training, Watch, connect
from ...sites import Stacked
from ..client_memberships import PointMemberships
from ..designs import DenseDesign
from ..families import Family
from ..likelihoods import Coefficients
from ..sample_rows import ClientRows

_FLAT_ROUNDS = 10  # a change below the tolerance over this many rounds counts as convergence


class FederatedSolution(NamedTuple):
    coefficients: Coefficients
    memberships: PointMemberships
    path: list[float]
    converged: bool


def solve_federated(
    rows: ClientRows, k: int, ids: Sequence[str], affinity: Affinity | None, penalty: float, tol: float, rounds: int,
    seed: int,
) -> FederatedSolution:  # fmt: skip
    """Fit with `ppfl.fit`."""
    family = rows.family
    if family.loss is None or family.link != family.links[0]:
        raise SettingError(
            f"solver = 'federated' has no family {family.name!r} with link {family.link!r}; use another solver"
        )
    if not isinstance(rows.varying, DenseDesign) or not isinstance(rows.shared, DenseDesign):
        raise SettingError("solver = 'federated' needs a dense table with one row per sample; use another solver")
    if not bool((rows.weight == rows.weight[0]).all()):
        raise SettingError("solver = 'federated' takes no sample weights; leave them out, or use another solver")
    if rows.offset is not None:
        raise SettingError("solver = 'federated' takes no offset; use another solver")
    x = torch.cat([rows.varying.x, rows.shared.x], 1)
    y = rows.y.long() if family.loss == "cross_entropy" else rows.y
    federation = Federation.from_arrays(
        x, y, [ids[i] for i in rows.client.tolist()], test_fraction=0, ids=ids,
        task="classification" if family.loss == "cross_entropy" else "regression",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = PartlySharedLinear(rows.varying.columns, rows.shared.columns, family.outputs)
    population = Population(net, k=k, canonical="varying", mix=rows.mix, loss=family.loss)
    training = Training(
        connect(federation, population, Stacked()), population, PPFL(penalty=penalty), rounds=rounds, seed=seed,
        affinity=affinity, watch=Watch(objective=True),
    ).begin()  # fmt: skip
    path = [float(end.record["objective"]) for end in training.rounds()]
    server = training.state.server
    coefficients, memberships = read_models(server.shared, server.memberships, family)
    if family.nuisance:
        mean = memberships.predict(rows, coefficients, rows.client)
        nuisance = torch.tensor(family.initial_nuisance(mean, rows.y), dtype=torch.float64)
        coefficients = coefficients._replace(nuisance=nuisance)
    return FederatedSolution(coefficients, memberships, path, is_flat(path, tol))


def read_models(models: Params, memberships: Tensor, family: Family) -> tuple[Coefficients, PointMemberships]:
    """What the server holds after the rounds, with nuisance parameters of 0."""
    c = memberships.double()
    canonical = models["varying.weight"].double().mT.contiguous()  # (K, q, m)
    no_columns = torch.zeros(0, family.outputs, dtype=torch.float64)
    shared = models["shared.weight"].double().T if "shared.weight" in models else no_columns
    nuisance = torch.zeros(len(family.nuisance), dtype=torch.float64)
    return Coefficients(canonical, shared, nuisance), PointMemberships(c / c.sum(1, keepdim=True))


def is_flat(path: Sequence[float], tol: float) -> bool:
    """Whether the objective has stopped to change."""
    last = path[-_FLAT_ROUNDS:]
    return len(path) > _FLAT_ROUNDS and max(last) - min(last) <= tol
