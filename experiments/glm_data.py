"""Public tables whose rows belong to clients, as `glm_comparison.py` fits them.

Files are named as their R packages name them (`lme4_sleepstudy.csv.gz`, from https://vincentarelbundock.github.io);
school.mat, vehicle.json.gz and the choices of electricity contracts are the ones that multi-task learning and
discrete choice use.
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
    situations: Array | None = None  # of choices: rows that are alternatives to each other

    @property
    def n_clients(self) -> int:
        return len(np.unique(self.clients))

    @property
    def slopes(self) -> list[int]:
        """Columns in which a client's own rows differ: only these can have a random slope."""
        spread = self.x.groupby(self.clients).std().fillna(0.0)
        return [at for at, name in enumerate(self.x) if (spread[name] > 0).mean() > 0.5]

    def rows_of(self) -> dict[object, Array]:
        """Positions, by client."""
        return pd.Series(self.clients).groupby(self.clients).indices

    def take(self, chosen: Array) -> Table:
        """By positions or marks."""
        situations = None if self.situations is None else self.situations[chosen]
        return Table(self.family, self.x.iloc[chosen], self.y[chosen], self.clients[chosen], situations)


def held_out(table: Table, fraction: float, seed: int) -> Array:
    """Marks the same fraction of every client's rows, or of its situations."""
    random = np.random.default_rng(seed)
    unit = np.arange(len(table.y)) if table.situations is None else table.situations
    _, first = np.unique(unit, return_index=True)
    chosen = []
    for client in np.unique(table.clients):
        own = unit[first[table.clients[first] == client]]
        chosen.append(random.permutation(own)[: round(fraction * len(own))])
    return np.isin(unit, np.concatenate(chosen))


def standardised(train: Table, test: Table) -> tuple[Table, Table]:
    """By the training rows."""
    mean, scale = train.x.mean(), train.x.std(ddof=0)
    scale[scale == 0] = 1.0
    return train._replace(x=(train.x - mean) / scale), test._replace(x=(test.x - mean) / scale)


def _coded(data: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Numbers as they are, categories as indicators but for the first."""
    return pd.get_dummies(data[list(columns)], drop_first=True).astype(float)


def _sleepstudy(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_sleepstudy.csv.gz")
    return Table("gaussian", _coded(data, "Days"), data.Reaction.to_numpy(), data.Subject.to_numpy())


def _exam(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Exam.csv.gz")
    x = _coded(data, "standLRT", "sex", "schgend", "schavg")
    return Table("gaussian", x, data.normexam.to_numpy(), data.school.to_numpy())


def _hsb82(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Hsb82.csv.gz")
    x = _coded(data, "cses", "sx", "minrty", "meanses", "sector")
    return Table("gaussian", x, data.mAch.to_numpy(), data.school.to_numpy())


def _schools(folder: Path) -> Table:
    held = scipy.io.loadmat(folder / "school.mat")
    scores = [y.ravel() for y in held["Y"][0]]
    pupils = [x if len(x) == len(y) else x.T for x, y in zip(held["X"][0], scores, strict=True)]
    clients = np.repeat(np.arange(len(scores)), [len(y) for y in scores])
    x = np.vstack(pupils).astype(float)
    x = x[:, _independent(x)]
    return Table("gaussian", pd.DataFrame(x).add_prefix("x"), np.concatenate(scores).astype(float), clients)


def _independent(x: Array) -> list[int]:
    """Columns that no others, with an intercept, make up."""
    centred = x - x.mean(0)
    _, r, order = scipy.linalg.qr(centred, mode="economic", pivoting=True)
    size = np.abs(np.diag(r))
    return sorted(order[size > 1e-8 * size.max()].tolist())


def _contraception(folder: Path) -> Table:
    data = pd.read_csv(folder / "mlmRev_Contraception.csv.gz")
    x = _coded(data.assign(age2=data.age**2), "age", "age2", "livch", "urban")
    return Table("bernoulli", x, (data.use == "Y").to_numpy().astype(int), data.district.to_numpy())


def _vehicle(folder: Path) -> Table:
    with gzip.open(folder / "vehicle.json.gz") as file:
        held = json.load(file)
    x, y = ([np.asarray(held["user_data"][user][part], float) for user in held["users"]] for part in "xy")
    clients = np.repeat(held["users"], [len(own) for own in y])
    target = (np.concatenate([own.ravel() for own in y]) > 0).astype(int)
    return Table("bernoulli", pd.DataFrame(np.vstack(x)).add_prefix("x"), target, clients)


def _epilepsy(folder: Path) -> Table:
    data = pd.read_csv(folder / "HSAUR_epilepsy.csv.gz")
    x = _coded(data.assign(base=np.log(data.base)), "base", "age", "treatment", "period")
    return Table("poisson", x, data["seizure.rate"].to_numpy(), data.subject.to_numpy())


def _grouseticks(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_grouseticks.csv.gz")
    x = _coded(data.astype({"YEAR": str}), "cHEIGHT", "YEAR")
    return Table("poisson", x, data.TICKS.to_numpy(), data.BROOD.to_numpy())


def _insteval(folder: Path) -> Table:
    data = pd.read_csv(folder / "lme4_InstEval.csv.gz")
    x = _coded(data.astype({"dept": str}), "studage", "lectage", "service", "dept")
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
