"""Pictures with several labels, an own loss and an own metric. Run this as a script, or cell by cell.

python examples/multilabel_images.py
"""

# %% Archives tag small pictures with the shapes that they show, and they do not agree on what deserves a tag.
#
# A picture shows some of four shapes, each bright or faint. Some archives tag the bright shapes, the others the faint
# ones. The pictures are drawn here, as bytes, and every archive has a few of its own.

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ppfl import PPFL, FedAvg, Federation, Population, Watch, fit
from ppfl.report import charts
from ppfl.report.theme import Metric

OUT = Path("runs/examples/multilabel_images")
ARCHIVES, PICTURES, ROUNDS = int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "20")), 80, 40
SHAPES = {
    "cross": ["#...#", ".#.#.", "..#..", ".#.#.", "#...#"],
    "square": ["#####", "#...#", "#...#", "#...#", "#####"],
    "bars": ["#####", ".....", "#####", ".....", "#####"],
    "plus": ["..#..", "..#..", "#####", "..#..", "..#.."],
}
STAMPS = torch.tensor([[[float(dot == "#") for dot in row] for row in rows] for rows in SHAPES.values()])


def draw(seed: int, tags_bright: bool) -> TensorDataset:
    """Pictures (n, 1, 14, 14) as bytes, and one label 0 or 1 per shape."""
    random = torch.Generator().manual_seed(seed)
    shade = torch.tensor([0, 120, 240])[torch.randint(0, 3, (PICTURES, 4), generator=random)]  # absent, faint, bright
    shift = torch.randint(0, 3, (PICTURES, 4, 2), generator=random)
    x = 12 * torch.rand(PICTURES, 1, 14, 14, generator=random)
    for i in range(PICTURES):
        for shape in range(4):
            row, column = 7 * (shape // 2) + int(shift[i, shape, 0]), 7 * (shape % 2) + int(shift[i, shape, 1])
            x[i, 0, row : row + 5, column : column + 5] += STAMPS[shape] * shade[i, shape]
    return TensorDataset(x.byte(), (shade == (240 if tags_bright else 120)).float())


tags_bright = {f"archive {i + 1}": i % 2 == 0 for i in range(ARCHIVES)}
federation = Federation.from_datasets(
    {name: draw(seed, bright) for seed, (name, bright) in enumerate(tags_bright.items())}, name="archives (simulated)"
)
print(federation.describe(), "\n")

# %% A loss of one's own: the focal loss, which gives less weight to labels that are already right
#
# A function of outputs and targets that gives one loss per label, or per sample; a sample's loss is the mean.


def focal_loss(output: Tensor, target: Tensor) -> Tensor:
    log_p = F.logsigmoid(torch.where(target == 1, output, -output))
    return -(1 - log_p.exp()).square() * log_p


# %% A metric of one's own: F1 of all labels, which is no mean over samples
#
# Predictions are the outputs here, because a plain function has no link: above 0, a shape is more likely than not.


def f1(prediction: Tensor, target: Tensor) -> float:
    found, true = prediction > 0, target == 1
    return float(2 * (found & true).sum() / (found.sum() + true.sum()).clamp_min(1))


# %% One model for all archives, or two that share what they see
#
# The first layer is common to all archives; what becomes a tag is decided by the last layer, of which there are two.

torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(196, 48), nn.ReLU(), nn.Linear(48, 4))
watch = Watch(every=10, metrics={"f1": f1})
training = {"lr": 1.0, "batch_size": 20, "local_epochs": 2}
one = fit(Population(net, k=1, loss=focal_loss), federation, FedAvg(**training), rounds=ROUNDS, watch=watch)
two = fit(
    Population(net, k=2, canonical="3", loss=focal_loss), federation, PPFL(**training), rounds=ROUNDS, watch=watch
)
print("            F1    mean over archives    worst tenth")
for name, fitted in {"one model": one, "two, mixed": two}.items():
    last = fitted.history[-1]
    print(f"{name:10}  {last['f1']:.2f}  {last['f1_mean']:18.2f}  {last['f1_worst_tenth']:13.2f}")

# %% Who tags what is in the memberships: nobody told the model

print("\nmembership of model A: ", end="")
for kind, is_bright in {"archives that tag bright shapes": True, "faint shapes": False}.items():
    rows = [two.membership(name)[0] for name, bright in tags_bright.items() if bright == is_bright]
    print(f"{torch.stack(rows).mean():.2f} of {kind}", end=", " if is_bright else "\n\n")

# %% A figure: F1 of both over the rounds

curves = {
    label: [(record["round"], record["f1"]) for record in fitted.history if "f1" in record]
    for label, fitted in {"PPFL, two models mixed": two, "one model for all": one}.items()
}
OUT.mkdir(parents=True, exist_ok=True)
charts.history(curves, Metric("F1", True)).save(OUT / "f1.svg")
print(f"wrote {OUT / 'f1.svg'}")
