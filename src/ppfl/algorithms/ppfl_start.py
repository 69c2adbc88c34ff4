"""Where memberships start, and the survey before the first round that finds it. Memberships that move before the
canonical models differ freeze a wrong assignment (lock-in), so clients are asked first which way they would pull a
common model.

All K canonical models begin with the same values, and each client makes a short sketch of the gradient of its whole
loss there. Where clients are mixtures of K kinds, their first gradients are mixtures of the K kinds' gradients, so the
sketches lie in a simplex; its corners are looked for by k-means along the main directions of the sketches.

Open: one message, in which clients send their sketches as rows ("sketch"), and the server finds the corners
(`start_from_sketches`). Private: the sketches stay with the clients, and the server sees sums over clients alone
(`PrivateStart`): first their moments ("moments"), then steps of k-means ("assign"); last, clients place themselves
among the corners ("place").

Where not all clients take part in a round, the survey asks those who do, or SURVEYED clients per canonical model where
these are more. All tasks then come with the corners and the network of the survey, and a client that works for the
first time places itself by a sketch of its own. It would be lock-in to let it train with an even membership first: it
would pull all models to where it is, while they hardly differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..core.draws import hashed, name_keys, uniform
from ..core.simplex import nearest_mixtures, raise_to_floor
from ..core.trees import Params, first_clients, tree_map
from ..io.codec import message
from .contract import Plan, Problem, Rows, Sum, Total, Upload, Who, Work, participants
from .local.batches import LocalData
from .local.sgd import TrainingLoss

if TYPE_CHECKING:
    from .ppfl import PPFL, PPFLClient, PPFLServer

SURVEYED = 10  # clients per canonical model that a survey asks at least: k-means among fewer misses corners
WIDTH = 256  # numbers in a sketch; distances between gradients are kept to about 10 %
TRUST = 0.9  # the rest is spread evenly: a start that no later step could leave would be lock-in again
MOST_POINTS = 20_000  # clients among whom corners are looked for, enough for K means, and rows in a block
RUNS = 20  # of k-means, of which the best one counts
RESTARTS = 64  # k-means runs side by side, where each step is a message
STEPS = 8  # of k-means: with one message before them and one after them that makes ten
PRIVATE_STAGES = "moments", "assign", "place"  # of the survey, where sketches stay with the clients


def gradient_sketch(models: Params, data: LocalData) -> tuple[Tensor, Tensor]:
    """(C, s): the gradient of each client's mean loss for one canonical model, hashed to s = WIDTH numbers; and that
    loss (C,)."""
    backend = data.backend
    clients, canonical = len(data.weight), backend.population.canonical_names
    networks = data.space.copies({name: v[0] if name in canonical else v for name, v in models.items()}, clients)
    gradient = data.space.empty_like(networks)
    sketches: Tensor | None = None
    losses = torch.zeros_like(data.weight)
    for batch in data.everything(backend.samples_per_block(clients)):
        n = len(batch.x)
        G = first_clients(gradient, n)
        loss = backend.add_gradients(first_clients(networks, n), G, 0.0, batch, only=canonical)
        share = batch.real / data.sizes[:n].to(batch.real)
        rows = torch.cat([G[name].flatten(1) for name in sorted(canonical)], dim=1)
        sketch = share[:, None] * count_sketch(rows, data.seed)
        sketches = sketch.new_zeros(clients, sketch.shape[1]) if sketches is None else sketches
        sketches[:n] += sketch
        losses[:n] += share * loss
    assert sketches is not None
    return sketches, losses


def count_sketch(rows: Tensor, seed: int) -> Tensor:
    """(C, d) to (C, WIDTH), inner products kept on average: each column goes to a random place, with a random sign.

    >>> count_sketch(torch.ones(2, 1000), seed=0).shape
    torch.Size([2, 256])
    """
    if rows.shape[1] <= WIDTH:
        return rows
    draws = hashed(seed, "sketch", torch.arange(rows.shape[1])).to(rows.device)
    sign = ((draws & 1) * 2 - 1).to(rows)
    return rows.new_zeros(len(rows), WIDTH).index_add_(1, (draws >> 1) % WIDTH, rows * sign)


# ---------------------------------------------------------------------- sketches that the server sees


@message
class Start(NamedTuple):
    """What places a client: where its sketch is along the main directions of all, and the corners there."""

    mean: Tensor  # (s,), of the sketches, float64 as all of these
    directions: Tensor  # (s, d)
    corners: Tensor  # (K, d)

    def memberships(self, sketches: Tensor) -> Tensor:
        """(C, K) start memberships of clients with these sketches (C, s)."""
        return start_memberships((sketches.double() - self.mean) @ self.directions, self.corners).to(sketches)


def start_from_sketches(
    sketches: Tensor, weights: Tensor, ids: Sequence[str], k: int, seed: int
) -> tuple[Start, Tensor]:
    """The start that the sketches of these clients give, and their memberships (M, K), whatever their order is.

    Principal directions, weighted by p_i since a small client's gradient is noisy; k-means there for the corners,
    among at most MOST_POINTS clients drawn by (seed, id); then each client as the nearest mixture of the corners.
    """
    by_name = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__))
    p = weights.cpu()[by_name].double()
    p = p / p.sum()
    mean, directions, points = principal_points(sketches, p, by_name, max(1, k - 1))
    asked = torch.arange(len(ids))
    if len(ids) > MOST_POINTS:
        draws = hashed(seed, "corners", name_keys(ids))[by_name]
        asked = draws.argsort()[:MOST_POINTS].sort().values
    corners = find_corners(points[asked], p[asked], k, seed)
    c = start_memberships(points, corners)
    in_order = torch.empty_like(c)
    in_order[by_name] = c
    return Start(mean, directions, corners), in_order.to(sketches)


def start_memberships(points: Tensor, corners: Tensor) -> Tensor:
    """(C, K): every point as the nearest mixture of the corners, and a part that is spread evenly."""
    return raise_to_floor(TRUST * nearest_mixtures(points, corners) + (1 - TRUST) / len(corners))


def principal_points(rows: Tensor, p: Tensor, order: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the rows, their `count` main directions, and (M, count) where rows[order] are along these, float64.
    Mean and directions are weighted by p.

    In blocks: all rows at once in double precision would take several times the memory of the rows.
    """
    blocks = torch.split(order, MOST_POINTS), torch.split(p, MOST_POINTS)

    def block(at: Tensor) -> Tensor:
        return rows[at.to(rows.device)].double().cpu()

    mean = torch.stack([share @ block(at) for at, share in zip(*blocks, strict=True)]).sum(0)
    moment = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for at, share in zip(*blocks, strict=True):
        centred = block(at) - mean
        moment += centred.T @ (share[:, None] * centred)
    main = torch.linalg.eigh(moment).eigenvectors[:, -count:]
    points = torch.empty(len(order), count, dtype=torch.float64)
    for at, part in zip(blocks[0], torch.split(points, MOST_POINTS), strict=True):
        torch.matmul(block(at) - mean, main, out=part)
    return mean, main, points


def find_corners(points: Tensor, p: Tensor, k: int, seed: int) -> Tensor:
    """(K, d): the centres of k-means on points (N, d) with weights p (N,), the heaviest group first.

    On one thread: with more of them scikit-learn adds up in any order, and no two runs would have the same bits.

    >>> two = torch.tensor([[0.0], [0.2], [5.0]], dtype=torch.float64)
    >>> find_corners(two, torch.ones(3), k=2, seed=0).flatten().round(decimals=9).tolist()
    [0.1, 5.0]
    """
    from sklearn.cluster import KMeans  # takes a second, and most processes have no survey
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    runs = KMeans(k, n_init=RUNS, tol=0, random_state=int(hashed(seed, "k-means")) % 2**32)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer than K different points have equal corners
        found = runs.fit(points.numpy(), sample_weight=p.numpy())
    groups = found.labels_.tolist()
    weight = torch.bincount(torch.tensor(groups), weights=p / p.sum(), minlength=k).tolist()
    by_first_client = [*dict.fromkeys([*groups, *range(k)])]  # the order of groups whose weights are equal
    order = sorted(by_first_client, key=lambda group: -round(weight[group], 9))
    return torch.from_numpy(found.cluster_centers_)[order]


# ---------------------------------------------------------------------- sketches that stay with the clients


class PrivateStart(NamedTuple):
    """The same from sums over clients alone: their moments, then steps of k-means, many runs of it side by side."""

    mean: Tensor  # (s,), of the sketches
    directions: Tensor  # (s, d), main directions of the sketches
    centres: Tensor  # (R, K, d), float64
    step: int = 0

    @classmethod
    def from_moments(cls, weight: Tensor, first: Tensor, second: Tensor, k: int, seed: int) -> PrivateStart:
        """From sum p_i, sum p_i s_i and sum p_i s_i s_i'. Centres start as draws of a normal distribution."""
        mean = first.double() / weight
        moment = second.double() / weight - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(moment)
        count = max(1, k - 1)
        spread = values[-count:].clamp_min(0).sqrt()
        draws = [uniform(seed, "centres", side, torch.arange(RESTARTS * k * count)) for side in (0, 1)]
        normal = (-2 * (1 - draws[0]).log()).sqrt() * (2 * torch.pi * draws[1]).cos()  # Box and Muller's
        centres = normal.reshape(RESTARTS, k, count).to(spread) * spread
        return cls(mean, vectors[:, -count:], centres)

    def points(self, sketches: Tensor) -> Tensor:
        """(C, d) of a client's sketches: where they are along the main directions."""
        return ((sketches.double() - self.mean) @ self.directions).to(sketches.dtype)

    def moved(self, weight: Tensor, points: Tensor, squares: Tensor) -> PrivateStart:
        """After one step of k-means, from the sums of each cell (R K,) of p_i, p_i x_i and p_i |x_i|^2.

        After the last step, `centres` are those of the best run, the largest group first, as (1, K, d).
        """
        restarts, k, _ = self.centres.shape
        weight, points = weight.double().reshape(restarts, k), points.double().reshape(restarts, k, -1)
        found = points / weight.clamp_min(1e-300)[..., None]
        centres = torch.where(weight[..., None] > 0, found, self.centres)
        if self.step + 1 == STEPS:
            around = squares.double().reshape(restarts, k) - weight * found.square().sum(-1)
            best = int(around.sum(1).argmin())
            centres = centres[best, weight[best].argsort(descending=True)][None]
        return self._replace(centres=centres, step=self.step + 1)

    @property
    def corners(self) -> Tensor | None:
        """(K, d) once they are found."""
        return self.centres[0] if self.step == STEPS else None


def nearest_cells(points: Tensor, centres: Tensor) -> Tensor:
    """(C, R K) one-hot for each of R runs: the nearest of its K centres (R, K, d) to every point (C, d)."""
    restarts, k, d = centres.shape
    distance = torch.cdist(points.double(), centres.reshape(-1, d).double()).reshape(-1, restarts, k)
    return one_hot(distance.argmin(-1), k).flatten(1).to(points.dtype)


# ---------------------------------------------------------------------- the survey, server


@message
class Survey(NamedTuple):
    """The task of a client in a survey."""

    stage: str


@message
class Placement(NamedTuple):
    """What clients that come after the survey place themselves by; without values until that has been made."""

    network: Params  # at which sketches are taken; canonical leaves (1, ...)
    start: Start

    @classmethod
    def empty(cls, problem: Problem, models: Params) -> Placement:
        """At the start, when all canonical models are equal."""
        network, k = one_network(problem, models), problem.population.k
        parameters = sum(network[name].numel() for name in problem.population.canonical_names)
        s, d = min(WIDTH, parameters), max(1, k - 1)
        return cls(network, Start(*(torch.zeros(shape, dtype=torch.float64) for shape in ((s,), (s, d), (k, d)))))


def one_network(problem: Problem, models: Params) -> Params:
    """The first canonical model, with the common part; canonical leaves (1, ...)."""
    canonical = problem.population.canonical_names
    return {name: leaf[:1] if name in canonical else leaf for name, leaf in models.items()}


def surveyed_clients(problem: Problem, participation: float, round: int) -> Who:
    """Whom a survey asks: all, or a round's participants."""
    return participants(problem, participation, round, at_least=SURVEYED * problem.population.k)


def plan_survey(method: PPFL, problem: Problem, server: PPFLServer, round: int) -> Plan:
    """The next message of the survey."""
    if method.share_memberships and method.start == "gradients":
        stage = "sketch"
    elif not server.survey:
        stage = "moments"
    else:
        stage = "assign" if server.survey.corners is None else "place"
    who = surveyed_clients(problem, method.participation, round)
    return Plan(who, Survey(stage), ends_round=stage in ("sketch", "place"))


def send_survey(problem: Problem, server: PPFLServer) -> dict[str, Any]:
    """One network, since all canonical models start equal, and what the private start has found so far."""
    so_far = ("mean", "directions", "centres") if server.survey else ()
    return {"models": one_network(problem, server.shared)} | {n: getattr(server.survey, n) for n in so_far}


def merge_survey(
    problem: Problem, server: PPFLServer, task: Survey, totals: dict[str, Total], rows: Rows
) -> PPFLServer:
    """The server after a message. The survey begins again where fewer than K clients came back."""
    k, survey = problem.population.k, server.survey
    if task.stage == "sketch":
        if rows.n_clients < k:
            return server
        ids = problem.roster.ids if rows.ids is None else rows.ids
        start, found = start_from_sketches(rows.values["sketch"], rows.values["importance"], ids, k, problem.seed)
        memberships = server.memberships.clone()
        memberships[problem.roster.positions(rows.ids)] = found
        return _with_start(server._replace(memberships=memberships), start)
    if task.stage == "place":
        return _with_start(server, Start(survey.mean, survey.directions, survey.corners))
    if task.stage == "assign":
        cells = totals["cells"]
        return server._replace(survey=survey.moved(cells.weight, cells.value["point"], cells.value["square"]))
    moments, clients = totals["moments"], totals["clients"]
    if round(float(clients.value["count"][0])) < k:
        return server
    weight = clients.weight[0].double()
    first, second = moments.weight, moments.value["sketch"]
    return server._replace(survey=PrivateStart.from_moments(weight, first, second, k, problem.seed))


def _with_start(server: PPFLServer, start: Start) -> PPFLServer:
    """The server once the start is found: the survey is over."""
    placement = server.placement
    if placement:
        placement = placement._replace(start=tree_map(lambda new, old: new.to(old), start, placement.start))
    return server._replace(started=torch.ones_like(server.started), survey={}, placement=placement)


# ---------------------------------------------------------------------- the survey, client


def answer_survey(task: Survey, shared: dict[str, Any], client: PPFLClient, data: LocalData) -> Work:
    """One message of a chunk of clients."""
    client = client._replace(placed=torch.full_like(client.placed, task.stage == "place"))
    if task.stage == "place":
        found = start_memberships(client.point.double(), shared["centres"][0].double())
        return Work(client._replace(membership=found.to(client.membership)), Upload())
    if task.stage == "assign":
        private, point = PrivateStart(shared["mean"], shared["directions"], shared["centres"]), client.point
        if bool((point == 0).all(1).any()):  # the first step for some of them
            sketch, _ = gradient_sketch(shared["models"], data)
            point = private.points(sketch)
        values = {"point": point, "square": point.square().sum(1)}
        cells = Sum(nearest_cells(point, private.centres), values)
        return Work(client._replace(point=point), Upload({"cells": cells}))
    sketch, losses = gradient_sketch(shared["models"], data)
    metrics = TrainingLoss(losses, data.sizes.to(losses)).metrics()
    if task.stage == "sketch":
        return Work(client, Upload({}, {"sketch": sketch, "importance": data.weight}, metrics))
    count = Sum(None, {"count": 1 / data.weight})  # p_i / p_i: how many clients there are
    sums = {"moments": Sum(sketch, {"sketch": sketch}), "clients": count}
    return Work(client._replace(point=torch.zeros_like(client.point)), Upload(sums, metrics=metrics))


def place_newcomers(placement: Placement, membership: Tensor, placed: Tensor, data: LocalData) -> Tensor:
    """Memberships (C, K), in which those who are not placed yet stand where a sketch of their own puts them."""
    new = (placed == 0).nonzero().flatten()
    if len(new) == 0:
        return membership
    with data.space.frame():
        sketch, _ = gradient_sketch(placement.network, data.select(new))
    return membership.index_copy(0, new, placement.start.memberships(sketch).to(membership))
