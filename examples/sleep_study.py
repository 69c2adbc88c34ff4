"""How does lack of sleep slow people down? Run this as a script, or cell by cell.

python examples/sleep_study.py     (uses the study in PPFL_DATA or ../shared/data if it exists, else a simulated one)
"""

# %% Eighteen people sleep three hours per night, and their reaction time is measured every day, in milliseconds.
#
# This study of Belenky et al. (2003) is a standard example for mixed models. Most people slow down, but by different
# amounts, and ten days are too few to estimate the line of each person on its own.

import os
from pathlib import Path

import numpy as np
import pandas as pd
from pictures import DATA, Panel, below, save, titled

from ppfl.glm import PopulationRegressor
from ppfl.report.drawing import Axis, text
from ppfl.report.palette import MIDDLE_GREY, mixed_colour, model_colour
from ppfl.report.simplex_plot import simplex_chart

OUT = Path("runs/examples/sleep_study")
FILE = DATA / "lme4_sleepstudy.csv.gz"


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
low, high = y.min(), y.max()
parts = []
for at, person in enumerate(people[:18]):
    left, top, colour = 60 + 140 * (at % 6), 90 + 160 * (at // 6), mixed_colour(shares[at])
    panel = Panel(Axis(0, 9, left, left + 120), Axis(low, high, top + 120, top))
    (slope,), start = model.client_coef(person)
    parts += [text(left - 8, panel.y.at(v) + 4, f"{v:g}", anchor="end") for v in panel.y.ticks(3) if at % 6 == 0]
    parts += [text(panel.x.at(day), top + 136, f"{day}", anchor="middle") for day in (0, 3, 6, 9)]
    parts += [text(left, top - 6, f"subject {person}"), panel.line([(0, low), (9, low)], MIDDLE_GREY, 0.5)]
    measured = data[subject == person][["Days", "Reaction"]].to_numpy()
    parts += [panel.dot(day, ms, colour, 2.6) for day, ms in measured]
    parts += [panel.line(zip(both, pooled_line, strict=True), MIDDLE_GREY, 1, stroke_dasharray="3 3")]
    parts += [panel.line(zip(both, start + slope * both, strict=True), colour, 2)]
subtitle = "Reaction time in ms over days of sleep deprivation. Dashed: one line for all."
everyone = titled(900, 90 + 160 * -(-min(18, len(people)) // 6), "The line of every subject", subtitle, *parts)

# %% The canonical lines, and the lines of all subjects

reach = starts[:, None] + slopes[:, None] * both
panel = Panel(Axis(0, 9, 60, 690), Axis(min(low, reach.min()), max(high, reach.max()), 400, 90))
parts = panel.frame("days of sleep deprivation", "reaction time, ms")
for at, line in enumerate(shares @ reach):
    parts.append(panel.line(zip(both, line, strict=True), mixed_colour(shares[at]), 1.2, opacity="0.6"))
for k, name in enumerate("AB"):
    parts.append(panel.line(zip(both, reach[k], strict=True), model_colour(k), 4))
    label = f"{name}: {starts[k]:.0f} ms, {slopes[k]:+.0f} per day".replace("-", "−")
    parts.append(text(700, panel.y.at(reach[k, 1]) + 4, label, fill=model_colour(k), font_weight="bold"))
subtitle = "Thick: the canonical sleepers. Thin: the subjects, each a mixture of the two."
canonical = titled(900, 450, "Canonical sleepers", subtitle, *parts)

# %% The membership of every subject

line = below(60, 900, 140, simplex_chart([str(person) for person in people], shares.tolist()))
memberships = titled(900, 210, "Memberships", "Each dot is a subject.", line)
save(OUT, everyone=everyone, canonical=canonical, memberships=memberships)
