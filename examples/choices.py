"""What do customers want, and what would they pay for it? Run this as a script, or cell by cell.

python examples/choices.py     (uses the survey in the folder PPFL_DATA if it exists, else simulated customers)
"""

# %% Customers chose, up to twelve times, one of four contracts for electricity.
#
# A contract has a price (cents per kWh) and a length in years. The company is local, well known or neither, and rates
# may depend on the time of day or on the season. The survey is from Train (2009), a conjoint study.

import os
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from ppfl.glm import NEW, PopulationChoice
from ppfl.report import charts
from ppfl.report.theme import model_colour, model_name

OUT = Path("runs/examples/choices")
FILE = Path(os.environ.get("PPFL_DATA", "data")) / "tabular" / "choicelearn_electricity.csv.gz"
WANTED = {"cl": "one year shorter", "loc": "a local company", "wk": "a well-known company"}
RATES = {"tod": "rates by time of day", "seas": "rates by season"}
K, COLUMNS = 3, ["pf", *WANTED, *RATES]


def simulated(customers: int) -> pd.DataFrame:
    """Customers who prefer the company they know, low prices, or short contracts, and mixtures of these."""
    random = np.random.default_rng(0)
    tastes = np.array([[-0.3, 0, 3.5, 2.5, -2.5, -2.5], [-1.4, -0.3, 1, 1.5, -13, -13], [-0.7, -0.6, 0.5, 0.5, -5, -5]])
    n = customers * 48
    rate, company = (random.integers(0, 3, n)[:, None] == np.arange(3) for _ in range(2))  # one third of each kind
    price, years = rate[:, 0] * random.choice([7, 9], n), random.choice([0, 1, 5], n)
    x = np.column_stack([price, years, company[:, :2], rate[:, 1:]]).astype(float)
    utility = (x * (random.dirichlet([0.15] * K, customers) @ tastes).repeat(48, 0)).sum(1) + random.gumbel(size=n)
    best = utility.reshape(-1, 4).max(1).repeat(4)
    customer, situation = np.arange(n) // 48 + 1, np.arange(n) // 4 + 1
    return pd.DataFrame(x, columns=COLUMNS).assign(choice=utility == best, id=customer, chid=situation)


data = pd.read_csv(FILE) if FILE.exists() else simulated(int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "150")))
data = data[data.id.isin(data.id.unique()[:150])]  # enough to find segments, in seconds instead of minutes
customers = data.id.unique()
print(f"{data.chid.nunique()} choices of {len(customers)} customers{'' if FILE.exists() else ' (simulated)'}\n")

# %% One in eight customers is new, and the last three choices of all others are held out

visit = data.groupby("id").chid.transform(lambda own: pd.factorize(own)[0])
late = visit >= data.groupby("id").chid.transform("nunique") - 3
new = data.id.isin(customers[-len(customers) // 8 :])
train, test = data[~new & ~late], data[~new & late]


def table(rows: pd.DataFrame) -> dict[str, object]:
    return {"X": rows[COLUMNS], "situations": rows.chid, "clients": rows.id}


def fit_and_score(label: str, **settings: object) -> PopulationChoice:
    model = PopulationChoice(**settings, n_init=3, tol=1e-4, random_state=0).fit(**table(train), y=train.choice)
    rows[label] = (model.bic_, model.score(**table(test), y=test.choice), model.deviance(**table(test), y=test.choice))
    return model


# %% One taste for all, segments, or a mixture of tastes for each customer?
#
# With mix = "predictions" a customer decides like one segment today and like another tomorrow. With mix = "weights" the
# tastes themselves are mixed. The first gives segments that are easy to interpret, the second predicts better.

rows: dict[str, tuple[float, float, float]] = {}
fit_and_score("one taste for all", k=1)
model = fit_and_score(f"{K} segments", k=K, mix="predictions")
fit_and_score(f"{K} tastes mixed", k=K, mix="weights")
print(pd.DataFrame(rows, index=["BIC", "accuracy", "deviance"]).T.round(3).to_string(), "\n")

# %% The segments, and what they would pay
#
# `canonical_coef_` is the change of utility per unit of each column. Divided by the utility of one cent it is a price.
# A segment that is hardly sensitive to the price would pay a lot for anything.

names = [model_name(k) for k in range(K)]
tastes = pd.DataFrame(model.canonical_coef_, index=names, columns=COLUMNS)
shares = model.memberships_.to_numpy()
print(tastes.assign(share=shares.mean(0)).round(2).to_string(), "\n")
pay = (tastes[[*WANTED, *RATES]].div(-tastes.pf, axis=0) * [-1, 1, 1, -1, -1]).rename(columns=WANTED | RATES)
print("Willingness to pay in cents per kWh; for rates, the equivalent fixed price:")
print(pay.T.round(1).to_string(), "\n")
print(f"{(shares.max(1) > 0.8).mean():.0%} of the customers have at least 80% of one segment; the others are mixed.\n")

# %% New customers
#
# The canonical tastes stay as they are, and a few choices are enough to find the membership of a new customer.

first, later = data[new & (visit < 4)], data[new & (visit >= 4)]
unknown = model.deviance(later[COLUMNS], later.choice, later.chid, clients=NEW)
memberships = model.onboard(**table(first), y=first.choice)
print(f"{len(memberships)} new customers, deviance of their later choices: {unknown:.2f} before onboarding, ", end="")
print(f"{model.deviance(**table(later), y=later.choice):.2f} after four choices")
print(memberships.set_axis(names, axis=1).head(4).round(2).to_string(), "\n")

# %% Two figures: the willingness to pay of each segment, and the memberships of all customers

worth = (
    pay[[*WANTED.values()]].rename_axis("segment").reset_index().melt("segment", var_name="wish", value_name="cents")
)
willingness = alt.Chart(worth).mark_bar().encode(
    alt.X("cents:Q", title="what a segment would pay, in cents per kWh"), alt.Y("wish:N", title=None),
    alt.Color("segment:N", scale=alt.Scale(domain=names, range=[model_colour(k) for k in range(K)])),
    yOffset="segment:N",
)  # fmt: skip
known = model.memberships_
memberships = charts.simplex(known.to_numpy(), [str(name) for name in known.index], names=names)
OUT.mkdir(parents=True, exist_ok=True)
for name, picture in {"willingness": willingness, "memberships": memberships}.items():
    picture.save(OUT / f"{name}.svg")
    print(f"wrote {OUT / name}.svg")
