"""Tables of visits for three clinics, and a site for each under the default policy.

Two kinds of patients react to age and glucose in opposite ways, so that one model for all is of no use.
"""

from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CLINICS = ("north", "south", "east")
SITE = """name = "{name}"

[data]
name = "csv"
file = "visits.csv"
client = "patient"
target = "outcome"
classes = ["ill", "well"]

[units]
glucose = "mg/dl"
"""


def visits(clinic: str, patients: int = 12, each: int = 30) -> list[str]:
    """Rows of a table: some values are missing, and some wards are rare."""
    random = np.random.default_rng(CLINICS.index(clinic))
    rows = []
    for patient in range(patients):
        side = 1 if patient % 2 else -1
        age = random.normal(50, 8)
        for _ in range(each):
            glucose, ward = random.normal(100, 20), random.choice(["medicine", "surgery", "heart"], p=[0.5, 0.4, 0.1])
            ill = side * (glucose - 100) / 10 + 0.5 * (ward == "surgery") + random.logistic() > 0
            shown = "" if random.random() < 0.03 else f"{glucose:.0f}"
            rows.append(f"{clinic}-{patient},{age:.0f},{shown},{ward},{'ill' if ill else 'well'}")
    return rows


def main() -> None:
    """Write the tables, and a folder for each site."""
    header, tables = "patient,age,glucose,ward,outcome", HERE / "tables"
    tables.mkdir(exist_ok=True)
    (tables / "all.csv").write_text("\n".join([header, *(row for name in CLINICS for row in visits(name))]) + "\n")
    for name in CLINICS:
        (tables / name).mkdir(exist_ok=True)
        (tables / name / "visits.csv").write_text("\n".join([header, *visits(name)]) + "\n")
        (tables / name / "site.toml").write_text(SITE.format(name=name))
        print(f"ppfl site init {tables / name} --name {name}")
        print(f"ppfl site check {HERE / 'clinics.toml'} --site {tables / name / 'site.toml'} --approve")
    sites = " ".join(f"--site {tables / name / 'site.toml'}" for name in CLINICS)
    print(f"ppfl federation up {HERE / 'clinics.toml'} {sites}")


if __name__ == "__main__":
    main()
