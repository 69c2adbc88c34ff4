"""The log-likelihood of ppfl at given parameters, compared with independent integration (glm_oracle.py).

    OMP_NUM_THREADS=1 python experiments/glm_integral.py [--clients 30] [--only gaussian poisson] [--out FILE]

The oracle takes most of the time. Its values are saved in --work and used again by the next run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from glm_oracle import Integral, marginal_log_likelihood
from glm_page import heading, markdown
from glm_simulate import FAMILIES, Drawn, draw, spread_corners

from ppfl.glm.designs import DenseDesign
from ppfl.glm.families import classification_family, regression_family
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.sample_rows import ClientRows

Array = np.ndarray[Any, Any]
ALPHA, DISTANCE = 0.4, 1.5


class Case(NamedTuple):
    family: str
    k: int
    rows: int
    columns: int
    split: bool = False  # one corner split in two with half its alpha each: the same likelihood with one more model

    @property
    def name(self) -> str:
        return f"{self.family}-{self.k}-{self.rows}-{self.columns}{'-split' * self.split}"


def cases(families: list[str], ks: list[int]) -> Iterator[Case]:
    for family in families:
        for k in ks:
            for rows in (5, 30, 200):
                for columns in (2, 5, 20):
                    yield Case(family, k, rows, columns)
        if 3 in ks:
            for columns in (2, 5):
                yield Case(family, 3, 30, columns, split=True)


def make_data(case: Case, clients: int, seed: int) -> tuple[Drawn, Array, Array]:
    """Data, and the canonical models and alpha at which the likelihood is evaluated."""
    random = np.random.default_rng([seed, FAMILIES.index(case.family), case.k, case.rows, case.columns])
    theta = spread_corners(case.k, case.columns, DISTANCE, random)
    drawn = draw(case.family, theta, clients, case.rows, ALPHA, random)
    theta, alpha = drawn.theta, np.full(case.k, ALPHA)
    if case.split:
        theta, alpha = np.vstack([theta, theta[-1:]]), np.append(alpha[:-1], [ALPHA / 2] * 2)
    return drawn, theta, alpha


def ours(drawn: Drawn, theta: Array, alpha: Array) -> tuple[float, float]:
    """The log-likelihood of ppfl and its own estimate of the error."""
    from ppfl.glm.solvers.integral import marginal_log_likelihood as integral

    family = classification_family(2) if drawn.family == "binomial" else regression_family(drawn.family)
    x, y = torch.from_numpy(drawn.x), torch.from_numpy(drawn.y)
    empty = DenseDesign(x.new_zeros(len(y), 0))
    client = torch.from_numpy(drawn.clients)
    rows = ClientRows(DenseDesign(x), empty, y, torch.ones_like(y), client, len(drawn.memberships), family, "weights")
    nuisance = [np.log(drawn.dispersion)] if drawn.family == "gaussian" else []
    coefficients = Coefficients(
        torch.from_numpy(theta)[..., None], x.new_zeros(0, 1), torch.tensor(nuisance, dtype=torch.float64)
    )
    value, error = integral(rows, coefficients, torch.from_numpy(alpha))
    return float(value), float(error)


def oracle(case: Case, drawn: Drawn, file: Path) -> Integral:
    """From the file, or computed. A split corner has the likelihood of the model before the split."""
    if not file.exists():
        theta, alpha = drawn.theta, np.full(case.k, ALPHA)
        found = marginal_log_likelihood(case.family, drawn.x, drawn.y, drawn.clients, theta, alpha, drawn.dispersion)
        file.write_text(json.dumps(found))
    return Integral(*json.loads(file.read_text()))


class Row(NamedTuple):
    case: Case
    difference: float  # ours minus the oracle's, for 100 clients
    own_error: float
    oracle_error: float
    seconds: float

    def cells(self) -> list[str]:
        k = f"{self.case.k} + 1 split" if self.case.split else str(self.case.k)
        sizes = [self.case.family, k, str(self.case.rows), str(self.case.columns)]
        numbers = [
            f"{self.difference:+.3f}",
            f"{self.own_error:.3f}",
            f"{self.oracle_error:.3f}",
            f"{self.seconds:.2f}",
        ]
        return sizes + numbers


HEAD = ["family", "K", "rows per client", "columns", "ours - oracle", "own error", "oracle's error", "s"]
NOTES = """\
Log-likelihoods with memberships integrated out, at the parameters that the data were drawn from: memberships from
Dirichlet(0.4), canonical models at distance 1.5 (at this mean distance where the columns are too few for a regular
simplex), {clients} clients. All differences and errors are in nats, scaled to 100 clients.

- oracle: `scipy.integrate.quad` for K = 2 and importance sampling around each client's mode for the others
  (`experiments/glm_oracle.py`, which shares no code with ppfl), with its own error.
- own error: what ppfl reports as the error of its log-likelihood. Seconds are those of ppfl's one evaluation.
- "3 + 1 split": one canonical model of three is there twice, with half its alpha each. The likelihood is the same as
  with three, but one direction of the simplex is not identified."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3, 4, 6])
    parser.add_argument("--oracle-only", action="store_true", help="compute and save the oracle's values only")
    parser.add_argument("--work", type=Path, default=Path("runs/glm-integral"))
    parser.add_argument("--out", type=Path, default=Path("results/glm-integral.md"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in cases(args.only, args.k):
        drawn, theta, alpha = make_data(case, args.clients, args.seed)
        start = time.process_time()
        file = args.work / f"{case._replace(split=False).name}-{args.clients}-{args.seed}.json"
        truth = oracle(case, drawn, file)
        if args.oracle_only:
            print(f"{case.name}: {truth} in {time.process_time() - start:.1f} s", flush=True)
            continue
        start = time.process_time()
        value, error = ours(drawn, theta, alpha)
        seconds = time.process_time() - start
        times = 100 / args.clients
        rows.append(Row(case, (value - truth.value) * times, error * times, truth.error * times, seconds))
        print(" | ".join(rows[-1].cells()), flush=True)
    if rows:
        worst = max(rows, key=lambda row: abs(row.difference))
        count = sum(abs(row.difference) <= 0.1 for row in rows)
        found = [
            f"Within 0.1 nats per 100 clients: {count} of {len(rows)} cases; the largest difference is "
            f"{worst.difference:+.3f} ({worst.case.name}).",
            f"The oracle's largest error is {max(row.oracle_error for row in rows):.3f}.",
            f"The difference is at most the reported error plus three errors of the oracle in "
            f"{sum(abs(r.difference) <= r.own_error + 3 * r.oracle_error for r in rows)} cases.",
        ]
        top = heading(
            "The likelihood compared with independent integration",
            shlex.join(["python", "experiments/glm_integral.py", *sys.argv[1:]]),
        )
        text = [top, "", NOTES.format(clients=args.clients), "", *markdown(HEAD, [row.cells() for row in rows], 2), ""]
        args.out.write_text("\n".join([*text, *(f"- {line}" for line in found), ""]))
        print("\n".join(found))


if __name__ == "__main__":
    main()
