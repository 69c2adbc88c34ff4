"""Texts that mean different things to different people, with an LSTM. Run this as a script, or cell by cell.

python examples/text_lstm.py
"""

# %% Reviews of forty shops, and what their customers thought
#
# A review is a list of words, and lists differ in length. Words are drawn from a small grammar of opinions and things.
# In one kind of shop, customers praise what is "cheap", "quick" and "loud"; in the other kind the same words are
# complaints. A shop may be in between. Shops do not share their reviews.

import os

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ppfl import Federation, Population, fit
from ppfl.algorithms import PPFL, FedAvg, Local

SHARED = {"good": 1, "friendly": 1, "bad": -1, "dirty": -1}  # opinions that are the same in all shops
BY_KIND = {"cheap": (1, -1), "quick": (1, -1), "loud": (1, -1), "slow": (-1, 1), "quiet": (-1, 1), "dear": (-1, 1)}
THINGS = ["place", "staff", "food", "music", "queue", "room"]
WORDS = ["", *SHARED, *BY_KIND, *THINGS]  # the first one pads short reviews
NUMBER = {word: at for at, word in enumerate(WORDS)}
LONGEST = 6
SHOPS = int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "40"))


def write_review(kind: int, generator: torch.Generator) -> tuple[list[str], int]:
    """Words, and whether the customer was content."""

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    while True:
        words, content = [], 0
        for _ in range(1 + draw(3)):
            opinion = [*SHARED, *BY_KIND][draw(len(SHARED) + len(BY_KIND))]
            sign = SHARED[opinion] if opinion in SHARED else BY_KIND[opinion][kind]
            words += [opinion, THINGS[draw(len(THINGS))]]
            content += sign
        if content:
            return words, int(content > 0)


# %% Lists of words become rows of numbers, with zeros at the end
#
# `is_first` is each shop's share of the first kind: most shops are of one kind, some are in between.

generator = torch.Generator().manual_seed(0)
is_first = torch.linspace(-4, 4, SHOPS).mul(1.5).sigmoid()
texts, labels, shops = [], [], []
for shop in range(SHOPS):
    for _ in range(40):
        kind = int(torch.rand((), generator=generator) > is_first[shop])
        words, label = write_review(kind, generator)
        texts.append([NUMBER[word] for word in words])
        labels.append(label)
        shops.append(f"shop-{shop:02d}")
x = torch.zeros(len(texts), LONGEST)
for row, text in zip(x, texts, strict=True):
    row[: len(text)] = torch.tensor(text)
federation = Federation.from_arrays(x, torch.tensor(labels), shops, test_fraction=0.25, name="reviews")
print(f"{len(texts)} reviews of {SHOPS} shops (simulated), 2 to {LONGEST} words")
print("for example:", " ".join(WORDS[at] for at in texts[0]), "->", "content" if labels[0] else "not content", "\n")

# %% An LSTM that reads as far as a review goes


class Reader(nn.Module):
    """Words to vectors, an LSTM over them, and a layer on the sum of its outputs."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.cells, self.head = nn.LSTM(width, width, batch_first=True), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1).cpu()
        packed = pack_padded_sequence(self.embed(x.long()), lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True)  # zeros after the last word
        return self.head(outputs.sum(1))


# %% One reader for all, one per shop, or a population of two?

torch.manual_seed(0)
net = Reader()
training = {"lr": 0.1, "batch_size": 16, "local_epochs": 2}
methods = {
    "one for all": (Population(net, k=1), FedAvg(**training)),
    "one per shop": (Population(net, k=1), Local(**training)),
    "population, K = 2": (Population(net, k=2, mix="predictions"), PPFL(**training)),
}
fitted = {}
for name, (population, method) in methods.items():
    fitted[name] = fit(population, federation, method, rounds=min(SHOPS // 4, 15))
    print(f"{name:18} {fitted[name].evaluate(federation).pooled:6.1%} of the held-out reviews are understood")

# %% Who is of which kind? Nobody told the model.

found = fitted["population, K = 2"].memberships[:, 0]
found = found if torch.corrcoef(torch.stack([found, is_first]))[0, 1] > 0 else 1 - found  # models have no order
print("\nshare of the first kind, true and found, of some shops:")
for shop in range(0, SHOPS, max(1, SHOPS // 8)):
    print(f"  shop-{shop:02d}  {is_first[shop]:4.2f}  {float(found[shop]):4.2f}")
