"""The paper's own algorithm: federated rounds of block coordinate descent, in which clients keep their data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...algorithms import PPFL
from ...core.affinity import Affinity
from ...core.errors import SettingError
from ...core.population import Population
from ...data import Federation
from ...server import InProcess, Watch, begin, choose_lr, make_problem, train_and_measure
from ...sites import Site, Stacked
from ..client_memberships import PointMemberships
from ..designs import DenseDesign
from ..likelihoods import Coefficients
from ..sample_rows import ClientRows

_FLAT_ROUNDS = 10  # a change below the tolerance over this many rounds counts as convergence


class _VaryingAndShared(nn.Module):
    """A linear model of the columns in which canonical models differ, and of those that all of them share."""

    def __init__(self, varying: int, shared: int, outputs: int) -> None:
        super().__init__()
        self.n_varying = varying
        self.varying = nn.Linear(varying, outputs, bias=False)
        self.shared = nn.Linear(shared, outputs, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        predictor: Tensor = self.varying(x[:, : self.n_varying])
        return predictor if self.shared is None else predictor + self.shared(x[:, self.n_varying :])


class FederatedSolution(NamedTuple):
    coefficients: Coefficients
    memberships: PointMemberships
    path: list[float]
    converged: bool


def solve_federated(
    rows: ClientRows, k: int, affinity: Affinity | None, penalty: float, tol: float, rounds: int, seed: int
) -> FederatedSolution:
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
    ids = [str(i) for i in range(rows.n_clients)] if affinity is None else affinity.ids
    federation = Federation.from_arrays(
        x, y, [ids[i] for i in rows.client.tolist()], test_fraction=0, ids=ids,
        task="classification" if family.loss == "cross_entropy" else "regression",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _VaryingAndShared(rows.varying.columns, rows.shared.columns, family.outputs)
    population = Population(net, k=k, canonical="varying", mix=rows.mix, loss=family.loss)
    transport = InProcess(Site(federation, population, Stacked()))
    problem = make_problem(population, transport, affinity, rounds=rounds, seed=seed)
    method = choose_lr(PPFL(penalty=penalty), problem, transport)
    start = begin(method, problem, transport)
    path: list[float] = []
    for end in train_and_measure(method, problem, transport, Watch(objective=True), start):
        path.append(float(end.record["objective"]))
    models, c = end.state.server.shared, end.state.server.memberships.double()
    canonical = models["varying.weight"].double().mT.contiguous()  # (K, q, m)
    no_columns = torch.zeros(0, family.outputs, dtype=torch.float64)
    shared = models["shared.weight"].double().T if "shared.weight" in models else no_columns
    memberships = PointMemberships(c / c.sum(1, keepdim=True))
    coefficients = Coefficients(canonical, shared, torch.zeros(len(family.nuisance), dtype=torch.float64))
    if family.nuisance:
        mean = memberships.predict(rows, coefficients, rows.client)
        nuisance = torch.tensor(family.initial_nuisance(mean, rows.y), dtype=torch.float64)
        coefficients = coefficients._replace(nuisance=nuisance)
    last = path[-_FLAT_ROUNDS:]
    converged = len(path) > _FLAT_ROUNDS and max(last) - min(last) <= tol
    return FederatedSolution(coefficients, memberships, path, converged)
