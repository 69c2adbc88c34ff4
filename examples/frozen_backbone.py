"""A pretrained network, and a head that is fitted to each client. Run this as a script, or cell by cell.

python examples/frozen_backbone.py     (uses the digits that come with scikit-learn; takes a few seconds)
"""

# %% A convolutional network is pretrained on public data, and clients with other data adapt its last layer.
#
# Half of the images are public: anyone may train on them. The other half belongs to clients, each of which writes only
# some of the ten digits and may not share its images.

import os
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, Watch, fit
from ppfl.data import MNIST_GROUPS, digits, label_groups

PER_GROUP = int(os.environ.get("PPFL_EXAMPLE_CLIENTS", "40")) // len(MNIST_GROUPS)

torch.manual_seed(0)
pool = digits()
x, y = pool.x, pool.y
images, order = x.reshape(-1, 1, 8, 8), torch.randperm(len(x))
public, private = order[: len(x) // 2], order[len(x) // 2 :]

# %% The network: a backbone that sees shapes, and a head that names the digit

backbone = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
)  # fmt: skip
net = nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(64, 10)))

# %% Pretraining on the public images is ordinary PyTorch.
#
# It is short on purpose: the backbone becomes useful, and the head still makes mistakes.

optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
for _ in range(4):
    for batch in torch.randperm(len(public)).split(64):
        loss = nn.functional.cross_entropy(net(images[public[batch]]), y[public[batch]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %% Freeze the backbone: what does not require a gradient is not trained, not copied for each client and not sent.

backbone.requires_grad_(False)
clients = label_groups(y[private], MNIST_GROUPS, clients=PER_GROUP)
federation = Federation.from_arrays(images[private], y[private], clients, test_fraction=0.4)
population = Population(net, canonical="head", k=len(MNIST_GROUPS), mix="weights")
print(federation.describe())
print(population, "\n")

# %% One head for all, one head per client, or a mixture of four heads?


def pooled_accuracy(network: nn.Module) -> float:
    test = federation.split("test")
    with torch.no_grad():
        return float((network(test.x).argmax(1) == test.y).float().mean())


def row(label: str, accuracy: float, sent: float = 0.0) -> None:
    print(f"{label:<28}{accuracy:>10.1%}{sent / 1000:>20.1f}")


def fit_heads(label: str, heads: Population, method: PPFL | FedAvg | Local) -> Fitted:
    fitted = fit(heads, federation, method, rounds=20, watch=Watch(every=20))
    sent = sum(record["bytes_up"] for record in fitted.history) / federation.n_clients
    row(label, fitted.evaluate(federation).pooled, sent)
    return fitted


print(f"{'':<28}{'accuracy':>10}{'kB sent per client':>20}")
row("pretrained", pooled_accuracy(net))
one_head = Population(net, canonical="head", k=1)
fit_heads("FedAvg, one head for all", one_head, FedAvg(lr=0.1))
fit_heads("Local, one head per client", one_head, Local(lr=0.1))
fitted = fit_heads(f"PPFL, {population.k} heads mixed", population, PPFL(lr=0.1))

# %% The network of one client is an ordinary module: its head is the mean of the canonical heads, by its membership.

client = federation.ids[0]
test = federation.client(client)["test"].x
own = fitted.model(client)
with torch.no_grad():
    same = torch.allclose(own(test).softmax(1), fitted.predict(client, test), atol=1e-6)
shares = ", ".join(f"{share:.0%}" for share in fitted.membership(client).tolist())
print(f"\n{client}: memberships {shares}; its own network predicts {'the same' if same else 'something else'}")

# %% As ONNX it runs without PyTorch, on a phone or in a browser. pip install 'ppfl[export]' onnxruntime

if find_spec("onnxscript") and find_spec("onnxruntime"):
    import onnxruntime

    folder = Path("runs/examples/frozen_backbone")
    folder.mkdir(parents=True, exist_ok=True)
    file = fitted.export_onnx(client, folder / f"{client}.onnx")
    (deployed,) = onnxruntime.InferenceSession(file).run(None, {"x": test.numpy()})
    far = abs(deployed - fitted.predict(client, test.numpy())).max()
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB, predictions within {far:.0e} in onnxruntime")
