"""What do customers want, and what would they pay for it? Run it as a script, or cell by cell.

python examples/choices.py     (with the survey in PPFL_DATA or ../shared/data, or else with simulated customers)
"""

# %% Customers chose, up to twelve times, one of four contracts for electricity.
#
# A contract has a price (cents a kWh), binds for some years, comes from a local or at least a well-known company, and
# may have rates by time of day or by season. The survey is Train's (2009); marketing calls this a conjoint study.

import os
from pathlib import Path

import numpy as np
import pandas as pd
from pictures import DATA, below, grouped_bars, save, titled

from ppfl.glm import PopulationChoice
from ppfl.report.drawing import text
from ppfl.report.palette import model_colour
from ppfl.report.simplex_plot import simplex_chart
from ppfl.report.sorted_memberships import letter

OUT = Path("runs/examples/choices")
FILE = DATA / "choicelearn_electricity.csv.gz"
WANTED = {"cl": "a year less bound", "loc": "a local company", "wk": "a well-known company"}
RATES = {"tod": "rates by time of day", "seas": "rates by season"}
K, COLUMNS = 3, ["pf", *WANTED, *RATES]


def simulated(customers: int) -> pd.DataFrame:
    """Who stays with the company they know, who minds the price, and who does not want to be bound."""
    random = np.random.default_rng(0)
    tastes = np.array([[-0.3, 0, 3.5, 2.5, -2.5, -2.5], [-1.4, -0.3, 1, 1.5, -13, -13], [-0.7, -0.6, 0.5, 0.5, -5, -5]])
    n = customers * 48
    rate, company = (random.integers(0, 3, n)[:, None] == np.arange(3) for _ in range(2))  # a third of each kind
    price, years = rate[:, 0] * random.choice([7, 9], n), random.choice([0, 1, 5], n)
    x = np.column_stack([price, years, company[:, :2], rate[:, 1:]]).astype(float)
    utility = (x * (random.dirichlet([0.15] * K, customers) @ tastes).repeat(48, 0)).sum(1) + random.gumbel(size=n)
    best = utility.reshape(-1, 4).max(1).repeat(4)
    who, situation = np.arange(n) // 48 + 1, np.arange(n) // 4 + 1
    return pd.DataFrame(x, columns=COLUMNS).assign(choice=utility == best, id=who, chid=situation)


data = pd.read_csv(FILE) if FILE.exists() else simulated(int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "150")))
data = data[data.id.isin(data.id.unique()[:150])]  # enough for segments, and seconds instead of minutes
customers = data.id.unique()
print(f"{data.chid.nunique()} choices of {len(customers)} customers{'' if FILE.exists() else ' (simulated)'}\n")

# %% Twenty customers come later, and of all others the last three choices are kept aside

turn = data.groupby("id").chid.transform(lambda own: pd.factorize(own)[0])
late = turn >= data.groupby("id").chid.transform("nunique") - 3
new = data.id.isin(customers[-len(customers) // 8 :])
train, test = data[~new & ~late], data[~new & late]


def table(rows: pd.DataFrame) -> dict[str, object]:
    return {"X": rows[COLUMNS], "situations": rows.chid, "clients": rows.id}


def judged(said: str, **settings: object) -> PopulationChoice:
    model = PopulationChoice(**settings, n_init=3, tol=1e-4, random_state=0).fit(**table(train), y=train.choice)
    rows[said] = (model.bic_, model.score(**table(test), y=test.choice), model.deviance(**table(test), y=test.choice))
    return model


# %% Everybody the same, segments, or everybody's own mixture of tastes?
#
# With mix = "predictions" a customer takes, so to speak, one segment's decision today and another's tomorrow; with
# mix = "weights" the tastes themselves mix. The first gives segments to look at, the second is the sharper forecaster.

rows: dict[str, tuple[float, float, float]] = {}
judged("one taste for all", k=1)
model = judged(f"{K} segments", k=K, mix="predictions")
judged(f"{K} tastes mixed", k=K, mix="weights")
print(pd.DataFrame(rows, index=["BIC", "choices foreseen", "deviance"]).T.round(3).to_string(), "\n")

# %% The segments, and what they would pay
#
# Utility rises by `canonical_coef_` for a unit of each column. Divided by what a cent costs in utility, it is money;
# a segment that hardly minds the price would pay a lot for anything.

names = [letter(k) for k in range(K)]
tastes = pd.DataFrame(model.canonical_coef_, index=names, columns=COLUMNS)
shares = model.memberships_.to_numpy()
print(tastes.assign(share=shares.mean(0)).round(2).to_string(), "\n")
pay = (tastes[[*WANTED, *RATES]].div(-tastes.pf, axis=0) * [-1, 1, 1, -1, -1]).rename(columns=WANTED | RATES)
print("Cents a kWh that it is worth, or for rates the fixed price they are as bad as:")
print(pay.T.round(1).to_string(), "\n")
print(f"{(shares.max(1) > 0.8).mean():.0%} of the customers are at least 80% of one segment; the others are between.\n")

# %% New customers
#
# Canonical tastes stay as they are: a few choices are enough to find where somebody belongs.

first, then = data[new & (turn < 4)], data[new & (turn >= 4)]
stranger = model.deviance(then[COLUMNS], then.choice, then.chid)
placed = model.onboard(**table(first), y=first.choice)
print(f"{len(placed)} new customers, deviance of what they choose later: {stranger:.2f} as strangers, ", end="")
print(f"{model.deviance(**table(then), y=then.choice):.2f} after four choices")
print(placed.set_axis(names, axis=1).head(4).round(2).to_string(), "\n")

# %% Two pictures: what is worth how much to whom, and who is who

parts = grouped_bars({name: pay[name].tolist() for name in WANTED.values()}, 230, 840, 90)
for k in range(K):
    said = f"{names[k]}, {shares[:, k].mean():.0%} of the customers"
    parts.append(text(230 + 190 * k, 72, said, fill=model_colour(k), font_weight="bold"))
said = "What each segment would pay for it, in cents a kWh."
willingness = titled(900, 320, "What it is worth to whom", said, *parts)
known = model.memberships_
triangle = below(56, 900, 474, simplex_chart([str(name) for name in known.index], known.to_numpy().tolist()))
said = "Each dot is a customer, each corner a segment; the cross is the mean."
save(OUT, willingness=willingness, memberships=titled(900, 540, "Who is who", said, triangle))
