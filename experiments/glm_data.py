"""Public tables with a client column, for `glm_comparison.py`.

Most files come from R packages and are named after them (`lme4_sleepstudy.csv.gz`, from
https://vincentarelbundock.github.io). school.mat and vehicle.json.gz are common in multi-task learning, and the choices
of electricity contracts in discrete choice.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.io
import scipy.linalg

Array = np.ndarray


class Table(NamedTuple):
    family: str  # gaussian, bernoulli, poisson or choice
    x: pd.DataFrame
    y: Array
    clients: Array
    situations: Array | None = None  # for choices: rows of one situation are alternatives

    @property
    def n_clients(self) -> int:
        return len(np.unique(self.clients))

    @property
    def slopes(self) -> list[int]:
        """Columns that vary within clients, which can have a random slope."""
        spread = self.x.groupby(self.clients).std().fillna(0.0)
        return [i for i, name in enumerate(self.x) if (spread[name] > 0).mean() > 0.5]

    def rows_by_client(self) -> dict[object, Array]:
        """The positions of each client's rows."""
        return pd.Series(self.clients).groupby(self.clients).indices

    def take(self, chosen: Array) -> Table:
        """Some rows, by position or as a mask."""
        situations = None if self.situations is None else self.situations[chosen]
        return Table(self.family, self.x.iloc[chosen], self.y[chosen], self.clients[chosen], situations)


def held_out(table: Table, fraction: float, seed: int) -> Array:
    """A mask with the same fraction of every client's rows, or of its situations."""
    random = np.random.default_rng(seed)
    unit = np.arange(len(table.y)) if table.situations is None else table.situations
    _, first = np.unique(unit, return_index=True)
    chosen = []
    for client in np.unique(table.clients):
        own = unit[first[table.clients[first] == client]]
        chosen.append(random.permutation(own)[: round(fraction * len(own))])
    return np.isin(unit, np.concatenate(chosen))


def standardise(train: Table, test: Table) -> tuple[Table, Table]:
    """Both tables, standardised by the training rows."""
    mean, scale = train.x.mean(), train.x.std(ddof=0)
    scale[scale == 0] = 1.0
    return train._replace(x=(train.x - mean) / scale), test._replace(x=(test.x - mean) / scale)


def _encode(data: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Numbers unchanged, and categories as indicators of all levels except the first."""
    return pd.get_dummies(data[list(columns)], drop_first=True).astype(float)


def _sleepstudy(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_sleepstudy.csv.gz")
    return Table("gaussian", _encode(data, "Days"), data.Reaction.to_numpy(), data.Subject.to_numpy())


def _exam(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Exam.csv.gz")
    x = _encode(data, "standLRT", "sex", "schgend", "schavg")
    return Table("gaussian", x, data.normexam.to_numpy(), data.school.to_numpy())


def _hsb82(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Hsb82.csv.gz")
    x = _encode(data, "cses", "sx", "minrty", "meanses", "sector")
    return Table("gaussian", x, data.mAch.to_numpy(), data.school.to_numpy())


def _schools(folder: Path) -> Table:
    data = scipy.io.loadmat(folder / "school.mat")
    scores = [y.ravel() for y in data["Y"][0]]
    pupils = [x if len(x) == len(y) else x.T for x, y in zip(data["X"][0], scores, strict=True)]
    clients = np.repeat(np.arange(len(scores)), [len(y) for y in scores])
    x = np.vstack(pupils).astype(float)
    x = x[:, _independent(x)]
    return Table("gaussian", pd.DataFrame(x).add_prefix("x"), np.concatenate(scores).astype(float), clients)


def _independent(x: Array) -> list[int]:
    """A largest set of columns that are linearly independent of each other and of an intercept."""
    centred = x - x.mean(0)
    _, r, order = scipy.linalg.qr(centred, mode="economic", pivoting=True)
    size = np.abs(np.diag(r))
    return sorted(order[size > 1e-8 * size.max()].tolist())


def _contraception(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Contraception.csv.gz")
    x = _encode(data.assign(age2=data.age**2), "age", "age2", "livch", "urban")
    return Table("bernoulli", x, (data.use == "Y").to_numpy().astype(int), data.district.to_numpy())


def _vehicle(folder: Path) -> Table:
    with gzip.open(folder / "vehicle.json.gz") as file:
        data = json.load(file)
    x, y = ([np.asarray(data["user_data"][user][part], float) for user in data["users"]] for part in "xy")
    clients = np.repeat(data["users"], [len(own) for own in y])
    target = (np.concatenate([own.ravel() for own in y]) > 0).astype(int)
    return Table("bernoulli", pd.DataFrame(np.vstack(x)).add_prefix("x"), target, clients)


def _epilepsy(folder: Path) -> Table:
    data = pd.read_csv(folder / "HSAUR_epilepsy.csv.gz")
    x = _encode(data.assign(base=np.log(data.base)), "base", "age", "treatment", "period")
    return Table("poisson", x, data["seizure.rate"].to_numpy(), data.subject.to_numpy())


def _grouseticks(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_grouseticks.csv.gz")
    x = _encode(data.astype({"YEAR": str}), "cHEIGHT", "YEAR")
    return Table("poisson", x, data.TICKS.to_numpy(), data.BROOD.to_numpy())


def _insteval(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_InstEval.csv.gz")
    x = _encode(data.astype({"dept": str}), "studage", "lectage", "service", "dept")
    return Table("gaussian", x, data.y.to_numpy().astype(float), data.s.to_numpy())


def _electricity(folder: Path) -> Table:
    data = pd.read_csv(folder / "choicelearn_electricity.csv.gz")
    x = data[["pf", "cl", "loc", "wk", "tod", "seas"]].astype(float)
    return Table("choice", x, data.choice.to_numpy().astype(int), data.id.to_numpy(), data.chid.to_numpy())


TABLES: dict[str, Callable[[Path], Table]] = {
    "sleepstudy": _sleepstudy,
    "Exam": _exam,
    "Hsb82": _hsb82,
    "school.mat": _schools,
    "Contraception": _contraception,
    "vehicle": _vehicle,
    "epilepsy": _epilepsy,
    "grouseticks": _grouseticks,
    "InstEval": _insteval,
    "Electricity": _electricity,
}
