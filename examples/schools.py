"""Which schools are good, and for whom? Run this as a script, or cell by cell.

python examples/schools.py     (uses the pupils in PPFL_DATA or ../shared/data if they exist, else simulated ones)
"""

# %% Sixty-five schools in inner London, four thousand pupils, two exams: at 11 (standLRT) and at 16 (normexam).
#
# A school that admits strong pupils has strong results, so a fair ranking compares exams at 16 given those at 11
# (Goldstein et al. 1993). But schools have two to two hundred pupils, and by chance the small ones are extreme.

import os
from pathlib import Path

import numpy as np
import pandas as pd
from pictures import DATA, Panel, save, titled
from sklearn.linear_model import Ridge

from ppfl.glm import PopulationRegressor, as_mixed_model
from ppfl.report.drawing import Axis, separate, text
from ppfl.report.palette import MIDDLE_GREY, mixed_colour, model_colour

OUT = Path("runs/examples/schools")
FILE = DATA / "mlmRev_Exam.csv.gz"


def simulated(schools: int) -> pd.DataFrame:
    """Schools that are mixtures of three kinds. Their quality does not depend on their size."""
    random = np.random.default_rng(0)
    lines = random.dirichlet([1.0] * 3, schools) @ np.array([[-0.7, 0.4], [0.3, 0.3], [0.5, 1.0]])
    school = np.repeat(np.arange(schools), np.exp(random.uniform(1, 5, schools)).astype(int) + 2)
    before, girl = random.normal(size=len(school)), random.random(len(school)) < 0.5
    after = lines[school, 0] + lines[school, 1] * before + 0.15 * girl + random.normal(0, 0.75, len(school))
    return pd.DataFrame({"school": school + 1, "standLRT": before, "sex": np.where(girl, "F", "M"), "normexam": after})


data = pd.read_csv(FILE) if FILE.exists() else simulated(int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "65")))
X = pd.DataFrame({"standLRT": data.standLRT, "girl": (data.sex == "F").astype(float)})
y, school = data.normexam, data.school
pupils = school.value_counts().sort_index()
print(f"{len(data)} pupils of {len(pupils)} schools{'' if FILE.exists() else ' (simulated)'}\n")

# %% One model for all, one model per school, or a population?
#
# A quarter of all pupils is held out. The advantage of girls is the same in all schools (shared); the intercept and the
# effect of the exam at 11 differ between schools.

test = np.random.default_rng(0).random(len(data)) < 0.25
test &= data.groupby("school").cumcount() >= 2  # each school keeps at least two pupils for training


def rmse(predicted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((predicted - y[test]) ** 2)))


predicted = y.copy()
for own in (school == name for name in school[test].unique()):
    predicted[own & test] = Ridge(1.0).fit(X[own & ~test], y[own & ~test]).predict(X[own & test])
rows = {"one model per school": (np.nan, rmse(predicted[test]))}
for k in (1, 2, 3, 4):
    model = PopulationRegressor(k, shared=["girl"], random_state=0).fit(X[~test], y[~test], clients=school[~test])
    rows[f"K = {k}"] = (model.bic_, rmse(model.predict(X[test], clients=school[test])))
print(pd.DataFrame(rows, index=["BIC", "error"]).T.to_string(float_format="{:.4g}".format, na_rep="–"), "\n")

# %% The canonical schools, now from all pupils
#
# The intercept is the result at 16 of a boy who was average at 11. The slope is how much of an advantage at 11 remains.

model = PopulationRegressor(3, shared=["girl"], random_state=0).fit(X, y, clients=school)
shares = model.memberships_.to_numpy()
starts, slopes = model.canonical_intercept_, model.canonical_coef_[:, 0]
names = ["A", "B", "C"]
print(pd.DataFrame({"share": shares.mean(0), "average boy": starts, "slope": slopes}, index=names).round(2), "\n")
fixed, _, covariance = as_mixed_model(model)
effects = pd.DataFrame({"fixed effect": fixed, "spread of schools": np.sqrt(np.diag(covariance))})
print("As a mixed model:", effects.round(2), "", sep="\n")

# %% The ranking of schools, from each school's own pupils and from the population

level = y - fixed["girl"] * X.girl  # results without the advantage of girls
alone = [Ridge(1.0).fit(X[["standLRT"]][school == name], level[school == name]).intercept_ for name in pupils.index]
table = pd.DataFrame({"pupils": pupils, "alone": alone})
table["population"] = shares @ starts
for label, by in (("its own pupils only", "alone"), ("the population model", "population")):
    print(f"The three best and the three worst schools according to {label}:")
    ranked = table.sort_values(by, ascending=False)
    print(pd.concat([ranked.head(3), ranked.tail(3)]).round(2).to_string(), "\n")
# %% Shrinkage: a school with few pupils stays near the mean
#
# A line leads from the estimate of each school's own pupils to that of the population model. Small schools, at the
# left, move most.

low, high = table[["alone", "population"]].min(axis=None), table[["alone", "population"]].max(axis=None)
panel = Panel(Axis(pupils.min() * 0.9, pupils.max() * 1.1, 60, 880, log=True), Axis(low, high, 440, 90))
parts = panel.frame("pupils per school", "average boy at 16, in standard deviations")
for at, row in enumerate(table.itertuples()):
    colour = mixed_colour(shares[at])
    parts.append(panel.line([(row.pupils, row.alone), (row.pupils, row.population)], colour, 1.2))
    parts.append(panel.dot(row.pupils, row.alone, MIDDLE_GREY, 3.2, hollow=True))
    parts.append(panel.dot(row.pupils, row.population, colour, 4))
subtitle = "Ring: own pupils only. Dot: population model, in the mixed colours of the canonical schools."
shrinkage = titled(900, 490, "Shrinkage of small schools", subtitle, *parts)

# %% The effect of the exam at 11, school by school

both = np.array([-3.0, 3.0])
reach = starts[:, None] + slopes[:, None] * both
panel = Panel(Axis(-3, 3, 60, 640), Axis(reach.min(), reach.max(), 440, 90))
parts = panel.frame("exam at 11, in standard deviations", "exam at 16, average boy")
for at, line in enumerate(shares @ reach):
    parts.append(panel.line(zip(both, line, strict=True), mixed_colour(shares[at]), 1, opacity="0.5"))
parts += [panel.line(zip(both, reach[k], strict=True), model_colour(k), 4) for k in range(3)]
for k, y_label in enumerate(separate([panel.y.at(end) for end in reach[:, 1]], 18, 90, 440)):
    label = f"{names[k]} ({shares[:, k].mean():.0%}): {starts[k]:+.2f}, slope {slopes[k]:.2f}".replace("-", "−")
    parts.append(text(650, y_label + 4, label, fill=model_colour(k), font_weight="bold"))
subtitle = "Thick: the canonical schools. Thin: the schools, each a mixture of them."
lines = titled(900, 490, "Canonical schools", subtitle, *parts)
save(OUT, shrinkage=shrinkage, lines=lines)
