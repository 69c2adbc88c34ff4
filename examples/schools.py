"""Which schools are good, and for whom? Run this as a script, or cell by cell.

python examples/schools.py     (uses the pupils in the folder PPFL_DATA if they exist, else simulated ones)
"""

# %% Sixty-five schools in inner London, four thousand pupils, two exams: at 11 (standLRT) and at 16 (normexam).
#
# A school that admits strong pupils has strong results, so a fair ranking compares exams at 16 given those at 11
# (Goldstein et al. 1993). But schools have two to two hundred pupils, and by chance the small ones are extreme.

import os
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from sklearn.linear_model import Ridge

from ppfl.glm import PopulationRegressor, as_mixed_model
from ppfl.report.theme import GREY, mixed_colour, model_colour

OUT = Path("runs/examples/schools")
FILE = Path(os.environ.get("PPFL_DATA", "data")) / "tabular" / "mlmRev_Exam.csv.gz"


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

table["colour"] = [mixed_colour(row) for row in shares]
table["school"] = table.index.astype(str)
x = alt.X("pupils:Q", scale=alt.Scale(type="log"), title="pupils per school")
y_axis = "average boy at 16, in standard deviations"
chart = alt.Chart(table)
colour = alt.Color("colour:N", scale=None)
shrinkage = alt.layer(
    chart.mark_rule().encode(x, alt.Y("alone:Q", title=y_axis), alt.Y2("population"), colour),
    chart.mark_point(color=GREY, size=30).encode(x, alt.Y("alone:Q")),
    chart.mark_circle(size=60, opacity=1).encode(x, alt.Y("population:Q"), colour, tooltip=["school", "pupils"]),
).properties(
    title=alt.Title("Shrinkage of small schools", subtitle="Ring: own pupils only. Dot: the population model.")
)

# %% The effect of the exam at 11, school by school

both = np.array([-3.0, 3.0])
reach = starts[:, None] + slopes[:, None] * both
lines = [(str(name), mixed_colour(row), 1.0, 0.5, row @ reach) for name, row in zip(table.school, shares, strict=True)]
lines += [(names[k], model_colour(k), 4.0, 1.0, reach[k]) for k in range(3)]
columns = ["line", "colour", "width", "opacity", "before", "after"]
rows = pd.DataFrame([(*own, at, y) for *own, ends in lines for at, y in zip(both, ends, strict=True)], columns=columns)
canonical = alt.Chart(rows).mark_line().encode(
    alt.X("before:Q", title="exam at 11, in standard deviations"), alt.Y("after:Q", title="exam at 16, average boy"),
    alt.Color("colour:N", scale=None), detail="line:N", strokeWidth=alt.StrokeWidth("width:Q", scale=None),
    opacity=alt.Opacity("opacity:Q", scale=None), tooltip=["line"],
).properties(title=alt.Title("Canonical schools", subtitle="Thin: the schools, each a mixture."))  # fmt: skip
OUT.mkdir(parents=True, exist_ok=True)
for name, picture in {"shrinkage": shrinkage, "lines": canonical}.items():
    picture.save(OUT / f"{name}.svg")
    print(f"wrote {OUT / name}.svg")
