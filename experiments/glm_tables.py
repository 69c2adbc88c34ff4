"""The public tables of `glm_comparison.py`.

Most come from R packages. A file such as `lme4_sleepstudy.csv.gz` in the data folder is read if it is there (they are
at https://vincentarelbundock.github.io); otherwise R writes the table to a cache folder. school.mat and vehicle.json.gz
are common in multi-task learning, and the choices of electricity contracts in discrete choice.
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
from glm_data import Array, Table
from glm_r import run_r

Frame = pd.DataFrame


class RTable(NamedTuple):
    """A data set of an R package, and which of its columns are used how."""

    package: str
    family: str
    target: str
    client: str
    columns: str  # separated by spaces; text becomes indicators of all levels except the first
    prepare: Callable[[Frame], Frame] = lambda data: data


def _cbpp_animals(data: Frame) -> Frame:
    """One row per animal, where the data set has the number of ill animals of each herd and period."""
    animals = data.loc[data.index.repeat(data["size"])]
    number = animals.groupby(level=0).cumcount()
    return animals.assign(ill=(number < animals.incidence).astype(int), period=animals.period.astype(str))


R_TABLES: dict[str, RTable] = {
    "sleepstudy": RTable("lme4", "gaussian", "Reaction", "Subject", "Days"),
    "Exam": RTable("mlmRev", "gaussian", "normexam", "school", "standLRT sex schgend schavg"),
    "Hsb82": RTable("mlmRev", "gaussian", "mAch", "school", "cses sx minrty meanses sector"),
    "Oxboys": RTable("nlme", "gaussian", "height", "Subject", "age"),
    "Orthodont": RTable("nlme", "gaussian", "distance", "Subject", "age Sex"),
    "Milk": RTable("nlme", "gaussian", "protein", "Cow", "Time Diet"),
    "Machines": RTable("nlme", "gaussian", "score", "Worker", "Machine"),
    "ChickWeight": RTable(
        "datasets", "gaussian", "weight", "Chick", "Time Diet", lambda data: data.astype({"Diet": str})
    ),
    "Penicillin": RTable("lme4", "gaussian", "diameter", "plate", "sample"),
    "radon": RTable("HLMdiag", "gaussian", "log.radon", "county", "basement uranium"),
    "wagepan": RTable("wooldridge", "gaussian", "lwage", "nr", "exper expersq union married educ black hisp"),
    "InstEval": RTable(
        "lme4", "gaussian", "y", "s", "studage lectage service dept", lambda data: data.astype({"dept": str})
    ),
    "Contraception": RTable(
        "mlmRev", "bernoulli", "use", "district", "age age2 livch urban",
        lambda data: data.assign(age2=data.age**2, use=data.use == "Y"),
    ),
    "ohio": RTable("geepack", "bernoulli", "resp", "id", "age smoke"),
    "VerbAgg": RTable(
        "lme4", "bernoulli", "r2", "id", "Anger Gender btype situ mode", lambda data: data.assign(r2=data.r2 == "Y")
    ),
    "bacteria": RTable(
        "MASS", "bernoulli", "y", "ID", "trt late", lambda data: data.assign(y=data.y == "y", late=data.week > 2)
    ),
    "toenail": RTable(
        "HSAUR3", "bernoulli", "outcome", "patientID", "treatment time",
        lambda data: data.assign(outcome=data.outcome == "moderate or severe"),
    ),
    "cbpp": RTable("lme4", "bernoulli", "ill", "herd", "period", _cbpp_animals),
    "epilepsy": RTable(
        "HSAUR", "poisson", "seizure.rate", "subject", "base age treatment period",
        lambda data: data.assign(base=np.log(data.base)),
    ),
    "grouseticks": RTable(
        "lme4", "poisson", "TICKS", "BROOD", "cHEIGHT YEAR", lambda data: data.astype({"YEAR": str})
    ),
    "Salamanders": RTable("glmmTMB", "poisson", "count", "site", "spp mined cover DOP Wtemp DOY"),
    "Owls": RTable(
        "glmmTMB", "poisson", "SiblingNegotiation", "Nest", "FoodTreatment SexParent ArrivalTime logBroodSize"
    ),
}  # fmt: skip


def _from_r(name: str, table: RTable, folder: Path, cache: Path) -> Table:
    data = table.prepare(_read(f"{table.package}_{name}", table.package, name, folder, cache))
    x = pd.get_dummies(data[table.columns.split()], drop_first=True).astype(float)
    kind = float if table.family == "gaussian" else int
    return Table(table.family, x, data[table.target].to_numpy().astype(kind), data[table.client].to_numpy())


def _read(file: str, package: str, name: str, folder: Path, cache: Path) -> Frame:
    if (folder / f"{file}.csv.gz").exists():
        return pd.read_csv(folder / f"{file}.csv.gz")
    written = cache / f"{file}.csv"
    if not written.exists():
        cache.mkdir(parents=True, exist_ok=True)
        run_r("-e", f'data("{name}", package="{package}"); write.csv(as.data.frame({name}), "{written}")')
    return pd.read_csv(written)


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


def _vehicle(folder: Path) -> Table:
    with gzip.open(folder / "vehicle.json.gz") as file:
        data = json.load(file)
    x, y = ([np.asarray(data["user_data"][user][part], float) for user in data["users"]] for part in "xy")
    clients = np.repeat(data["users"], [len(own) for own in y])
    target = (np.concatenate([own.ravel() for own in y]) > 0).astype(int)
    return Table("bernoulli", pd.DataFrame(np.vstack(x)).add_prefix("x"), target, clients)


def electricity(folder: Path) -> Table:
    data = pd.read_csv(folder / "choicelearn_electricity.csv.gz")
    x = data[["pf", "cl", "loc", "wk", "tod", "seas"]].astype(float)
    return Table("choice", x, data.choice.to_numpy().astype(int), data.id.to_numpy(), data.chid.to_numpy())


OTHER_TABLES: dict[str, Callable[[Path], Table]] = {"school.mat": _schools, "vehicle": _vehicle}
NAMES = [*R_TABLES, *OTHER_TABLES]


def load_table(name: str, folder: Path, cache: Path) -> Table:
    """A table by name, from the data folder or from R."""
    if name in OTHER_TABLES:
        return OTHER_TABLES[name](folder)
    return _from_r(name, R_TABLES[name], folder, cache)
