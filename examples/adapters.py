"""A pretrained network, and low-rank adapters that clients share or mix. Run this as a script, or cell by cell.

python examples/adapters.py     (uses the digits that come with scikit-learn; takes a few seconds)
"""

# %% A network is pretrained on public images. Clients come in four groups that name some digits in another way.

import copy
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import nn

from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, Watch, fit, lora, with_adapters
from ppfl.data import digits

CLIENTS = 40

torch.manual_seed(0)
pool = digits()
x, y = pool.x, pool.y
order = torch.randperm(len(x))
public, private = order[:600], order[600:]
net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(60):
    loss = nn.functional.cross_entropy(net(x[public]), y[public])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

names = torch.arange(10).repeat(4, 1)  # what each group calls the digits
for group, pair in product(range(4), range(3)):
    a = (2 * group + 3 * pair) % 10
    b = (a + 1 + pair) % 10
    names[group, [a, b]] = names[group, [b, a]]
client = torch.arange(len(private)) % CLIENTS
ids = [f"g{at % 4}-c{at // 4}" for at in client.tolist()]
federation = Federation.from_arrays(x[private], names[client % 4, y[private]], ids, test_fraction=0.4)
print(federation.describe())

# %% Adapters of the last layer: one for all, one per client, or four that are mixed by membership?
#
# All other weights stay as they are. With four adapters a client still sends one.

adapters = lora(rank=8, on="2")
one = Population(with_adapters(net, adapters), k=1)
four = Population(net, canonical=adapters, k=4)
print(four, "\n")


def train(label: str, population: Population, method: PPFL | FedAvg | Local) -> Fitted:
    fitted = fit(population, federation, method, rounds=15, watch=Watch(every=15))
    sent = fitted.history[-1]["bytes_up"] / federation.n_clients
    print(f"{label:<28}{fitted.evaluate(federation).pooled:>10.1%}{sent / 1000:>30.2f}")
    return fitted


print(f"{'':<28}{'accuracy':>10}{'kB sent per client and round':>30}")
train("FedAvg, one adapter for all", one, FedAvg(lr=0.1, local_epochs=5))
train("Local, one per client", one, Local(lr=0.1, local_epochs=5))
fitted = train("PPFL, four adapters mixed", four, PPFL(lr=0.1, local_epochs=5))

# %% One client's adapter, for programs that know peft. Without them, its network is a plain one with merged weights.

who = federation.ids[0]
folder = fitted.save_adapter(who, Path("runs/examples/adapters") / who)
shares = ", ".join(f"{share:.0%}" for share in fitted.membership(who).tolist())
print(f"\n{who}: memberships {shares}; its adapter is in {folder}; merged: {fitted.model(who)}")
if find_spec("peft"):
    import peft

    model = peft.PeftModel.from_pretrained(copy.deepcopy(net), folder)
    with torch.no_grad():
        far = float((model(x[private]) - fitted.model(who)(x[private])).abs().max())
    print(f"outputs within {far:.0e} in peft")
