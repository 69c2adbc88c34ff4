"""A hundred new clients next week, from a saved file. Run this as a script, or cell by cell.

python examples/onboarding.py
"""

# %% Two hundred machines that differ, and a model of each
#
# What a machine uses depends on five settings, in its own way: every machine is a mixture of three kinds. We learn the
# three canonical models and save everything to one file.

import os
from pathlib import Path

import torch

from ppfl import FedAvg, Federation, Population, fit, load
from ppfl.data import Samples, synthetic_linear
from ppfl.report import charts
from ppfl.report.theme import Metric

OUT = Path("runs/examples/onboarding")
OUT.mkdir(parents=True, exist_ok=True)
MACHINES, SAMPLES = int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "300")), 32

everyone = synthetic_linear(MACHINES, samples=SAMPLES, noise=0.5, seed=1)
known, new = everyone.select(everyone.ids[: 2 * MACHINES // 3]), everyone.select(everyone.ids[2 * MACHINES // 3 :])
print(f"{known.n_clients} machines now, {new.n_clients} next week (simulated)\n")

population = Population(torch.nn.Linear(5, 1), k=3, loss="squared")
file = fit(population, known, rounds=60).save(OUT / "machines.safetensors")
one_for_all = fit(Population(torch.nn.Linear(5, 1), k=1, loss="squared"), known, FedAvg(), rounds=60)
print(f"saved {file} ({file.stat().st_size / 1024:.0f} kB)\n")

# %% Next week, in another process: new machines, each with a few samples
#
# `onboard` fits the membership of every new machine, three numbers, and leaves the models and the known machines as
# they are. That takes a moment, and it takes no more than a machine's own samples.


def first_samples(federation: Federation, n: int) -> Federation:
    """The same clients with their first n training samples."""
    x, y = federation.train.x.reshape(-1, SAMPLES, 5)[:, :n], federation.train.y.reshape(-1, SAMPLES)[:, :n]
    train = Samples(x.reshape(-1, 5), y.reshape(-1), torch.arange(federation.n_clients + 1) * n)
    return Federation(federation.ids, train, federation.test, name=f"{n} samples each")


fitted = load(file)
fitted = fitted.onboard(first_samples(new, 8))
client = new.ids[0]
print(f"{len(fitted.ids)} machines are known now; {client} is {fitted.membership(client).numpy().round(2)}")
print(f"its own model, without ppfl: {fitted.model(client)}\n")

# %% How many samples does a new machine need?
#
# The error on samples to come, of three models: the one model for all, a model of the machine's own samples alone
# (least squares, drawn to the mean model by as much as its noise deserves), and the membership.


def rmse(found: torch.Tensor) -> float:
    return float((found.reshape(-1) - new.test.y).square().mean().sqrt())


def predict(of_client) -> torch.Tensor:
    return torch.cat([of_client(client, new.client(client)["test"].x).reshape(-1) for client in new.ids])


def alone(few: Federation) -> torch.Tensor:
    """Ridge regression of each machine by itself, around the model for all."""
    mean = one_for_all.predict

    def of_client(client: str, x: torch.Tensor) -> torch.Tensor:
        own = few.client(client)["train"]
        residual = own.y - mean(known.ids[0], own.x).reshape(-1)
        w = torch.linalg.solve(own.x.T @ own.x + torch.eye(5), own.x.T @ residual)
        return mean(known.ids[0], x).reshape(-1) + x @ w

    return predict(of_client)


for_all = rmse(predict(lambda _, x: one_for_all.predict(known.ids[0], x)))
curves: dict[str, dict[int, float]] = {"membership": {}, "alone": {}, "one model for all": {}}
print("samples  membership   alone   one model for all")
for n in (1, 2, 4, 8, 16, 32):
    few = first_samples(new, n)
    joined = load(file).onboard(few)
    curves["membership"][n] = rmse(predict(joined.predict))
    curves["alone"][n], curves["one model for all"][n] = rmse(alone(few)), for_all
    print(f"{n:7}  {curves['membership'][n]:10.3f}  {curves['alone'][n]:6.3f}  {for_all:18.3f}")

# %% A month later: train on with everyone
#
# Known machines keep their states, and the new ones are onboarded first.

later = fit(fitted.population, everyone, rounds=20, start=fitted)
before, after = (model.evaluate(everyone).pooled for model in (fitted, later))
print(f"\nerror of all {MACHINES} machines: {before:.3f}, and after 20 more rounds with all of them: {after:.3f}")

# %% The error of new machines by their number of samples

errors, measured = (
    {name: list(curve.items()) for name, curve in curves.items()},
    Metric("error on samples to come", False),
)
OUT.mkdir(parents=True, exist_ok=True)
picture = charts.history(errors, measured, x="samples of a new machine", log=True, ours=["membership"])
picture.save(OUT / "samples.svg")
print(f"wrote {OUT / 'samples.svg'}")
