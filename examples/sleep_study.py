"""How does lack of sleep slow people down? Run this as a script, or cell by cell.

python examples/sleep_study.py     (uses the study in the folder PPFL_DATA if it exists, else a simulated one)
"""

# %% Eighteen people sleep three hours per night, and their reaction time is measured every day, in milliseconds.
#
# This study of Belenky et al. (2003) is a standard example for mixed models. Most people slow down, but by different
# amounts, and ten days are too few to estimate the line of each person on its own.

import os
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from ppfl.glm import PopulationRegressor
from ppfl.report import charts
from ppfl.report.theme import GREY, mixed_colour, model_colour

OUT = Path("runs/examples/sleep_study")
FILE = Path(os.environ.get("PPFL_DATA", "data")) / "tabular" / "lme4_sleepstudy.csv.gz"


def simulated(people: int) -> pd.DataFrame:
    """People who are mixtures of two kinds of sleepers."""
    random = np.random.default_rng(0)
    lines = random.dirichlet([0.7, 0.7], people) @ np.array([[285.0, 22.0], [220.0, 0.0]])
    subject, days = np.repeat(np.arange(people), 10), np.tile(np.arange(10.0), people)
    reaction = lines[subject, 0] + lines[subject, 1] * days + random.normal(0, 20, len(subject))
    return pd.DataFrame({"Subject": subject + 1, "Days": days, "Reaction": reaction})


data = pd.read_csv(FILE) if FILE.exists() else simulated(int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "18")))
people = np.unique(data.Subject)
print(f"{len(data)} measurements of {len(people)} people{'' if FILE.exists() else ' (simulated)'}\n")

# %% Do the first eight days predict the last two?
#
# One line for all ignores the differences between people, and one line per person overfits. A population of K canonical
# sleepers is in between: it shares data among similar people. BIC (smaller is better) does not use the last two days.

early = data.Days < 8
X, y, subject = data[["Days"]], data.Reaction, data.Subject


def rmse(predicted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((predicted - y[~early]) ** 2)))


def own_line(person: object) -> np.ndarray:
    own = subject == person
    line = np.polyfit(X.Days[own & early], y[own & early], 1)
    return np.polyval(line, X.Days[own & ~early])


models = {k: PopulationRegressor(k, random_state=0).fit(X[early], y[early], clients=subject[early]) for k in (1, 2, 3)}
rows = {f"K = {k}": (m.bic_, rmse(m.predict(X[~early], clients=subject[~early]))) for k, m in models.items()}
alone = pd.concat([pd.Series(own_line(person), index=X.index[(subject == person) & ~early]) for person in people])
rows["one line per person"] = (np.nan, rmse(alone.loc[X.index[~early]].to_numpy()))
print(pd.DataFrame(rows, index=["BIC", "error on days 8 and 9, ms"]).T.round(1).to_string(na_rep="–"), "\n")

# %% Two canonical sleepers, now from all ten days
#
# They are the two ends of a scale, slightly beyond all people. A membership is the position of a person on this scale.

model = PopulationRegressor(2, random_state=0).fit(X, y, clients=subject)
shares = model.memberships_.to_numpy()
starts, slopes = model.canonical_intercept_, model.canonical_coef_[:, 0]
ends = pd.DataFrame({"share": shares.mean(0), "rested, ms": starts, "slower per day, ms": slopes}, index=["A", "B"])
print(ends.round(2).to_string(), "\n")
order = np.argsort(shares[:, 0])[[-1, len(people) // 2, 0]]  # the nearest to each end, and one in the middle
print(model.memberships_.set_axis(ends.index, axis=1).iloc[order].round(2).to_string(), "\n")

# %% The line of every person
#
# Each is a mixture of the two canonical lines, in the same mixture of their colours. The dashed line is one model for
# all. Where a line misses the dots, K = 3 would help, as level and slope could then vary independently.

pooled = PopulationRegressor(1).fit(X, y)
both = np.array([0.0, 9.0])
pooled_line = pooled.canonical_intercept_[0] + pooled.canonical_coef_[0, 0] * both
dots, lines = data.assign(person=subject.astype(str)), []
for at, person in enumerate(people):
    (slope,), start = model.client_coef(person)
    for kind, ends in (("own", start + slope * both), ("one for all", pooled_line)):
        lines += [(str(person), kind, mixed_colour(shares[at]) if kind == "own" else GREY, day, ms)
                  for day, ms in zip(both, ends, strict=True)]  # fmt: skip
lines = pd.DataFrame(lines, columns=["person", "line", "colour", "Days", "Reaction"])
x, ms = alt.X("Days:Q"), alt.Y("Reaction:Q", title="ms", scale=alt.Scale(zero=False))
base = alt.Chart().encode(x, ms)
everyone = alt.layer(
    base.mark_line().encode(alt.Color("colour:N", scale=None), detail="line:N").transform_filter("isValid(datum.line)"),
    base.mark_circle(color=GREY, size=18).transform_filter("!isValid(datum.line)"),
    data=pd.concat([dots, lines]),
).properties(width=110, height=110).facet("person:N", columns=6)  # fmt: skip

# %% The canonical lines, and the lines of all subjects

reach = starts[:, None] + slopes[:, None] * both
ends = [(str(person), mixed_colour(row), 1.2, row @ reach) for person, row in zip(people, shares, strict=True)]
ends += [(name, model_colour(k), 4.0, reach[k]) for k, name in enumerate("AB")]
rows = pd.DataFrame([(*own, day, ms) for *own, line in ends for day, ms in zip(both, line, strict=True)],
                    columns=["line", "colour", "width", "day", "ms"])  # fmt: skip
canonical = alt.Chart(rows).mark_line().encode(
    alt.X("day:Q", title="days of sleep deprivation"), alt.Y("ms:Q", title="reaction time, ms", scale={"zero": False}),
    alt.Color("colour:N", scale=None), detail="line:N", strokeWidth=alt.StrokeWidth("width:Q", scale=None),
    tooltip=["line"],
).properties(title=alt.Title("Canonical sleepers", subtitle="Thin: the subjects, each a mixture."))  # fmt: skip

# %% The membership of every subject

memberships = charts.simplex(shares, [str(person) for person in people])
OUT.mkdir(parents=True, exist_ok=True)
for name, picture in {"everyone": everyone, "canonical": canonical, "memberships": memberships}.items():
    picture.save(OUT / f"{name}.svg")
    print(f"wrote {OUT / name}.svg")
