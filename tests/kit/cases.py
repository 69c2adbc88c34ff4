"""Every method with settings of its own: what the laws of all methods run over."""

import torch

from kit.networks import make_net
from kit.training import Trained, run
from ppfl import algorithms as methods
from ppfl.algorithms import PPFL
from ppfl.algorithms.server_optimizers import Adam, Momentum
from ppfl.core import Population, affinity

SIZES = (7, 12, 20, 5, 1, 9)
SMALL = {"lr": 0.3, "batch_size": 4, "weight_decay": 0.01}
POOLED = {"local_steps": 1, "momentum": 0}  # with momentum at the server: SGD on the data of all together
CASES = {
    "local": (methods.Local(**SMALL), 1, "outputs"),
    "fedavg": (methods.FedAvg(**SMALL), 1, "outputs"),
    "fedprox": (methods.FedProx(**SMALL, mu=0.5), 1, "outputs"),
    "fedprox-some": (methods.FedProx(**SMALL, mu=0.5, participation=0.5, local_steps=3), 1, "outputs"),
    "scaffold": (methods.Scaffold(**SMALL), 1, "outputs"),
    "scaffold-some": (methods.Scaffold(**SMALL, participation=0.5, local_epochs=2), 1, "outputs"),
    "fedavg-some": (methods.FedAvg(**SMALL, participation=0.5, local_steps=3), 1, "outputs"),
    "fedavgm": (methods.FedAvgM(**SMALL), 1, "outputs"),
    "fedavgm-some": (
        methods.FedAvgM(**SMALL, server_optimizer={"lr": 0.5}, participation=0.5, local_steps=3),
        1,
        "outputs",
    ),
    "fedadagrad": (methods.FedAdagrad(**SMALL, server_optimizer={"lr": 0.1}), 1, "outputs"),
    "fedadam-some": (methods.FedAdam(**SMALL, participation=0.5), 1, "outputs"),
    "fedyogi": (methods.FedYogi(**SMALL, server_optimizer={"lr": 0.1, "tau": 0.01}), 1, "outputs"),
    "lg-fedavg": (methods.LGFedAvg(**SMALL), 1, "outputs"),
    "fedper-some": (methods.FedPer(**SMALL, participation=0.5), 1, "outputs"),
    "fedrep": (methods.FedRep(**SMALL, head_epochs=2), 1, "outputs"),
    "fedalt-some": (methods.FedAlt(**SMALL, personal_part="input", participation=0.5, local_steps=3), 1, "outputs"),
    "fedsim": (methods.FedSim(**SMALL, local_epochs=2), 1, "outputs"),
    "fedsim-all-personal": (methods.FedSim(**SMALL, personal_part=("0", "2")), 1, "outputs"),
    "ppfl-outputs": (PPFL(**SMALL, penalty=0.02), 3, "outputs"),
    "ppfl-predictions": (PPFL(**SMALL, penalty=0.02, membership_steps=4), 3, "predictions"),
    "ppfl-weights": (PPFL(**SMALL, penalty=0.02), 3, "weights"),
    "ppfl-random-some": (PPFL(**SMALL, order="random", participation=0.5, membership_batch=3), 3, "predictions"),
    "ppfl-uniform": (PPFL(**SMALL, start="uniform"), 3, "outputs"),
    "ppfl-private": (PPFL(**SMALL, share_memberships=False), 3, "outputs"),
    "ppfl-private-some": (PPFL(**SMALL, share_memberships=False, participation=0.5), 2, "weights"),
    "pooled-some": (methods.FedAvgM(**SMALL | POOLED, participation=0.5), 1, "weights"),
    "ditto": (methods.Ditto(**SMALL), 1, "outputs"),
    "ditto-some": (methods.Ditto(**SMALL, participation=0.5, local_steps=3), 1, "outputs"),
    "pfedme": (methods.PFedMe(**SMALL, mu=1.0, outer_lr=0.2), 1, "outputs"),
    "pfedme-some": (methods.PFedMe(**SMALL, mu=1.0, outer_lr=0.2, beta=1.5, participation=0.5), 1, "outputs"),
    "finetune": (methods.FineTune(method=methods.FedAvg(**SMALL), steps=3), 1, "outputs"),
    "finetune-ppfl": (methods.FineTune(method=PPFL(**SMALL, penalty=0.02, participation=0.5), epochs=2), 3, "weights"),
    "finetune-ditto": (methods.FineTune(method=methods.Ditto(**SMALL, participation=0.5), lr=0.1), 1, "outputs"),
    "finetune-fedadam": (methods.FineTune(method=methods.FedAdam(**SMALL), steps=2), 1, "outputs"),
    "ppfl-adam-some": (PPFL(**SMALL, participation=0.5, server_optimizer=Adam()), 3, "weights"),
    "fedper-momentum": (methods.FedPer(**SMALL, server_optimizer=Momentum(lr=0.5)), 1, "outputs"),
    "ifca": (methods.IFCA(**SMALL), 3, "outputs"),
    "ifca-some": (methods.IFCA(**SMALL, participation=0.5, local_steps=3, momentum=0.9), 2, "weights"),
    "fedem": (methods.FedEM(**SMALL), 3, "predictions"),
    "fedem-some": (methods.FedEM(**SMALL, participation=0.5, local_steps=3), 2, "predictions"),
    "cfl": (methods.CFL(**SMALL, eps1=10, eps2=0), 3, "outputs"),  # cuts whatever it can
    "cfl-some": (methods.CFL(**SMALL, eps1=10, eps2=0, participation=0.5, local_steps=3), 2, "predictions"),
}


def affinity_for(method, federation):
    """How alike the labels of clients are, for methods whose clients may be pulled together."""
    if not getattr(method, "share_memberships", True):
        return None
    return affinity.from_labels(federation.label_counts().to(federation.train.x.dtype), federation.ids)


def run_case(case, federation, net: torch.nn.Module | None = None, **settings) -> Trained:
    """A run of a method with K models and a way of mixing, on a perceptron unless another network is given."""
    method, k, mix = case
    net = make_net(dtype=federation.train.x.dtype) if net is None else net
    return run(method, Population(net, k=k, mix=mix), federation, affinity=affinity_for(method, federation), **settings)
