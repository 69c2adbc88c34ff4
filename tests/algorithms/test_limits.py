"""Where one method is another: at the edges of its settings it trains the same models, or fits clients as well."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import ppfl
from kit.problems import make_federation, make_linear, make_net, with_seed
from kit.training import at_start, losses_of_clients, run
from kit.twins.plain import weights_of
from ppfl.algorithms.server_optimizers import Adagrad, Adam, Momentum, ServerOptimizer, Yogi
from ppfl.core import lora, with_adapters

FEDERATION = make_federation(dtype=torch.float64)
NET = make_net(dtype=torch.float64)
W = ppfl.affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
SMALL = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
SOME = {**SMALL, "participation": 0.5, "local_epochs": 2}
WHOLE = {"lr": 0.2, "batch_size": None, "local_epochs": 3}
HARD = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2}
SOFT = HARD | {"lr": 0.05}
FIXED = {"membership_steps": 0, "start": "uniform", "warmup": 0}  # memberships stay where they start
SLOW = {"beta2": 1 - 1e-9}
MIXES = ["outputs", "predictions", "weights"]


def side(method, *, net=NET, federation=FEDERATION, rounds=4, engine="stacked", dropout=0.0, affinity=None, **more):
    """A run, once. alike: canonical models start alike; memberships: where clients start; collapse: whether a client's
    run may be that of one model; the rest: the population."""
    settings, alike, at = {"rounds": rounds, "affinity": affinity}, more.pop("alike", 0), more.pop("memberships", None)
    collapse = more.pop("collapse", True)

    @cache
    def trained():
        of, start = ppfl.Population(net, **{"k": 1, **more}), None
        of.collapses &= collapse
        if alike:
            start = at_start(method, of, federation, models=of.initial_models(0), memberships=at, **settings)
        return run(method, of, federation, engine=engine, dropout=dropout, resume=start, **settings)

    return trained


def models(found, at=-1):
    """Parameters by name, with memberships if there are any; leaves of K models, of every client, or of one network."""
    now = found.models(at)
    return now._asdict().get("values") or {**now.models, "memberships": now.memberships}


def used(found, at=-1):
    """The first model of all, which everybody uses where there is one cluster, and the last loss that was reported."""
    now, loss = models(found, at), torch.tensor(found.reports[at].loss, dtype=torch.float64)
    return {**({name: leaf[0] for name, leaf in now.items()} if "memberships" in now else now), "loss": loss}


def losses(found, at=-1):
    """How well every client's personal model fits."""
    return {"losses": losses_of_clients(found, at)}


def server(found, at=-1):
    """The models that the server holds."""
    return found.states[at].server.shared


class AddChange(ServerOptimizer):
    """An optimizer of one's own."""

    def start(self, shared):
        return {}

    def step(self, shared, change, state):
        return {name: leaf + change[name] for name, leaf in shared.items()}, state


class EveryKind(nn.Module):
    """Convolutions, an embedding and a linear layer, each of which can be adapted."""

    def __init__(self):
        super().__init__()
        self.filters, self.signs, self.out = nn.Conv1d(1, 3, 2), nn.Embedding(2, 9), nn.Linear(9, 3)

    def forward(self, x):
        seen = self.filters(x[:, None]).flatten(1).relu()
        return self.out(seen + self.signs((x[:, 0] > 0).long()))


EVERY_KIND, LINEAR = with_seed(EveryKind), make_linear(dtype=torch.float64)
DEEP = with_seed(lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6)), nn.Linear(6, 3)))
IMAGES = with_seed(lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(4, 3)))
FROZEN = with_seed(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))
FROZEN[0].requires_grad_(False)
AFTER_FROZEN = nn.Sequential(nn.Identity(), nn.Identity(), *FROZEN[2:])
HEAD_ALONE = copy.deepcopy(NET)
HEAD_ALONE[0].requires_grad_(False)
ADAPTED = with_adapters(NET, lora(rank=2, alpha=3))
ADAPTERS = {  # a network and the adapters of some of its layers
    "every layer": {"net": NET, "canonical": lora(rank=2, alpha=3)},
    "the last layer": {"net": NET, "canonical": lora(rank=2, on="2")},
    "the first layer": {"net": NET, "canonical": lora(rank=2, on="0")},
    "every kind of layer": {"net": EVERY_KIND, "canonical": lora(rank=2, on=("filters", "signs", "out"))},
}
ALONE = make_federation((9,), dtype=torch.float64)
ONE = FEDERATION.client("client-2")["train"]
SAME_DATA = ppfl.Federation.from_arrays(
    ONE.x.repeat(3, 1), ONE.y.repeat(3), [f"c{i}" for i in range(3) for _ in ONE.y], test_fraction=0.0
).to(dtype=torch.float64)
FEATURES = replace(FEDERATION, train=replace(FEDERATION.train, x=FROZEN[:2](FEDERATION.train.x)))
FEDAVG, OF_SOME, LOCAL = side(ppfl.FedAvg(**SMALL)), side(ppfl.FedAvg(**SOME)), side(ppfl.Local(**SMALL))


def limits():
    """Name, special method, general method, and what must agree if it is not all models."""
    yield "fedprox without a pull is fedavg", side(ppfl.FedProx(**SOME, mu=0)), OF_SOME
    yield "ditto without a pull is local", side(ppfl.Ditto(**SMALL, mu=0)), LOCAL
    yield "ditto's shared model is that of fedavg", side(ppfl.Ditto(**SOME, mu=1)), OF_SOME, server
    plain = ppfl.FedAvgM(**SOME, server_optimizer={"momentum": 0})
    yield "a server step of 1 without momentum is fedavg", side(plain), OF_SOME
    first_round = side(ppfl.FedAvg(**SMALL, momentum=0), rounds=1)
    yield "the first round of scaffold is that of fedavg", side(ppfl.Scaffold(**SMALL), rounds=1), first_round
    one = {"lr": 0.1, "batch_size": None, "local_steps": 1, "momentum": 0}
    yield "scaffold with one step is fedavg", side(ppfl.Scaffold(**one)), side(ppfl.FedAvg(**one))
    for kind, more in ((ppfl.FedAdagrad, {}), (ppfl.FedAdam, SLOW), (ppfl.FedYogi, SLOW)):
        # m / (sqrt(v) + tau) is d / (2 tau) where v stays near tau^2
        adaptive = kind(**SMALL, server_optimizer={"lr": 2e4, "tau": 1e4, "beta1": 0, **more})
        yield f"{kind.name} with a large tau is fedavg", side(adaptive), FEDAVG

    # optimizers of the server
    for optimizer, kind in (
        (Momentum(lr=0.5, momentum=0.7), ppfl.FedAvgM),
        (Adagrad(lr=0.1, tau=0.01), ppfl.FedAdagrad),
        (Adam(lr=0.1, beta1=0.5), ppfl.FedAdam),
        (Yogi(lr=0.1, beta2=0.9), ppfl.FedYogi),
    ):
        setting = {**SMALL, "server_optimizer": optimizer}
        theirs = side(kind(**setting))
        yield f"fedavg with {type(optimizer).__name__} is {kind.name}", side(ppfl.FedAvg(**setting)), theirs
        yield f"ppfl over members with {type(optimizer).__name__}", side(ppfl.PPFL(**setting, warmup=0)), theirs
        everyone = ppfl.PPFL(**setting, warmup=0, averaging="everyone")
        yield f"ppfl over everyone with {type(optimizer).__name__}", side(everyone, collapse=False), theirs

    plain = ppfl.FedAvg(**SMALL, server_optimizer=AddChange())
    yield "fedavg with an optimizer that adds the change is fedavg", side(plain), FEDAVG

    # clusters
    yield "ifca with one model is fedavg", side(ppfl.IFCA(**SMALL, momentum=0.9)), FEDAVG, used
    yield "fedem with one model is fedavg", side(ppfl.FedEM(**SMALL), mix="predictions"), FEDAVG, used
    yield "fedem of a common part", side(ppfl.FedEM(**SMALL), mix="predictions", canonical="2"), FEDAVG
    yield "cfl with one model is fedavg", side(ppfl.CFL(**SMALL, eps1=10, eps2=0)), FEDAVG, used
    yield "cfl without cuts is fedavg", side(ppfl.CFL(**SMALL, eps1=0), k=3), FEDAVG, used
    yield "cfl of some clients", side(ppfl.CFL(**SOME, eps1=0), k=3, mix="weights"), OF_SOME, used

    # partial personalization; where k = 1, `canonical` says nothing
    output, inputs = (side(ppfl.FedSim(**SMALL, personal_part=part)) for part in ("output", "input"))
    yield "fedper is fedsim", side(ppfl.FedPer(**SMALL), canonical="2"), output
    yield "lg-fedavg is fedsim", side(ppfl.LGFedAvg(**SMALL), canonical="0"), inputs
    fedalt = side(ppfl.FedAlt(**SMALL, personal_part="output", personal_epochs=3))
    yield "fedrep is fedalt", side(ppfl.FedRep(**SMALL, head_epochs=3)), fedalt
    yield "fedsim with nothing personal is fedavg", side(ppfl.FedSim(**SMALL, personal_part=())), FEDAVG
    yield "fedalt with nothing personal is fedavg", side(ppfl.FedAlt(**SMALL, personal_part=())), FEDAVG
    yield "fedsim with all personal is local", side(ppfl.FedSim(**SMALL, personal_part=("0", "2"))), LOCAL
    for method, limit in ((ppfl.LGFedAvg, ppfl.FedAvg), (ppfl.FedPer, ppfl.Local)):
        yield f"{method.name} of one layer", side(method(**SMALL), net=LINEAR), side(limit(**SMALL), net=LINEAR)
    body = side(ppfl.FedSim(**SMALL, personal_part="0"), net=DEEP)
    yield "all but the head of a deep network is personal", side(ppfl.LGFedAvg(**SMALL), net=DEEP), body
    alone, whole = side(ppfl.Local(**SMALL), federation=ALONE), side(ppfl.Local(**WHOLE), federation=SAME_DATA)
    all_personal = ppfl.FedAlt(**WHOLE, personal_part=("0", "2"))
    yield "fedalt with all personal is local", side(all_personal, federation=SAME_DATA), whole
    for method in (ppfl.FedPer, ppfl.LGFedAvg):
        yield f"{method.name} of one client is local", side(method(**SMALL), federation=ALONE), alone
        yield f"{method.name} on equal data is local", side(method(**WHOLE), federation=SAME_DATA), whole

    # PPFL
    private, pulled = (ppfl.PPFL(**SMALL, share_memberships=False, penalty=penalty) for penalty in (0, 0.1))
    yield "a penalty between no neighbours changes nothing", side(pulled, k=2), side(private, k=2)
    alone = side(ppfl.FedAvg(**HARD))
    for mix, part, collapse in (
        ("outputs", "all", True), ("outputs", "0", False), ("outputs", "2", True), ("predictions", "all", True),
        ("predictions", "2", True), ("weights", "all", False), ("weights", "2", True),
    ):  # fmt: skip
        # over several local steps: each client's network moves as fast as it would alone
        equal = side(ppfl.PPFL(**HARD, **FIXED), k=3, mix=mix, canonical=part, alike=True, collapse=collapse)
        yield f"equal memberships of equal models are fedavg, {mix} of {part}", equal, alone
    for mix in MIXES:
        one = side(ppfl.PPFL(**SMALL, start="uniform"), mix=mix)
        yield f"ppfl with one canonical model is fedavg, {mix}", one, FEDAVG
        for part, method in (("2", ppfl.FedPer), ("0", ppfl.LGFedAvg), ("all", ppfl.Local)):
            # memberships fixed at the unit vectors: the canonical part is each client's own, theta_com is shared
            units = {"alike": True, "memberships": torch.eye(4, dtype=torch.float64)}
            own = side(ppfl.PPFL(**SMALL, **FIXED), k=4, mix=mix, canonical=part, **units)
            yield f"a canonical model per client is {method.name}, {mix}", own, side(method(**SMALL))
    for mix, settings, lost in (
        ("weights", {}, 0.0), ("predictions", {"participation": 0.5, "order": "random"}, 0.0),
        ("outputs", {}, 0.4), ("predictions", {"participation": 0.7}, 0.3),
    ):  # fmt: skip
        method = ppfl.PPFL(**SMALL, **settings, start="uniform")
        unseen = method.model_copy(update={"share_memberships": False})
        both = (side(one, k=3, mix=mix, dropout=lost) for one in (unseen, method))
        yield f"private memberships change nothing, {mix}, {lost} lost", *both

    # short cut 1, of mixed weights and of affine outputs, against the run of K models; adapters are always affine
    for mix, of, averaging in (
        ("weights", {"canonical": "all"}, "members"), ("weights", {"canonical": "all"}, "everyone"),
        ("weights", {"canonical": "2"}, "members"), ("outputs", {"canonical": "2"}, "everyone"),
        ("outputs", {"canonical": "0"}, "members"), ("outputs", {"canonical": ("0", "2")}, "members"),
        *((mix, of, "members") for mix in ("outputs", "weights") for of in ADAPTERS.values()),
        *((mix, ADAPTERS["every layer"], "everyone") for mix in ("outputs", "weights")),
    ):  # fmt: skip
        method = ppfl.PPFL(**HARD, penalty=0.05, start="uniform", averaging=averaging)
        name = f"the collapse is exact, {mix} of {of['canonical']}, {averaging}, {type(of.get('net')).__name__}"
        yield name, *(side(method, k=4, mix=mix, affinity=W, collapse=collapse, **of) for collapse in (True, False))
    for name, of in ADAPTERS.items():
        for start in ("uniform", "gradients"):
            method = ppfl.PPFL(**HARD, membership_steps=3, start=start, warmup=0)
            both = (side(method, k=3, mix=mix, **of) for mix in ("outputs", "weights"))
            yield f"mixed outputs of adapters are mixed weights, {name}, {start}", *both
    for k in (1, 3):
        adapters = side(ppfl.PPFL(**HARD, **FIXED), **ADAPTERS["every layer"], k=k, alike=True)
        yield f"{k} equal adapters are one", adapters, side(ppfl.FedAvg(**HARD), net=ADAPTED), server
    own, alone = (side(m, net=ADAPTED) for m in (ppfl.FedPer(**SOFT, personal_part="adapters"), ppfl.Local(**SOFT)))
    yield "wholly personal adapters are local", own, alone
    method = ppfl.PPFL(**SMALL, membership_steps=20)
    both = (side(method, net=HEAD_ALONE, k=3, canonical="2", mix=mix) for mix in ("outputs", "weights"))
    yield "with all but the head frozen mixed outputs are mixed weights", *both

    # frozen layers
    for method, settings in (
        (ppfl.FedAvg(**SMALL), {"engine": "loop"}),
        (ppfl.LGFedAvg(**SMALL), {}),
        (ppfl.FedPer(**SMALL, participation=0.5), {}),
        (ppfl.Ditto(**SMALL), {"engine": "loop"}),
        (ppfl.PPFL(**SMALL), {"k": 2, "mix": "outputs", "engine": "loop"}),
        (ppfl.PPFL(**SMALL), {"k": 2, "mix": "predictions", "canonical": "4"}),
        (private, {"k": 2, "mix": "weights", "canonical": "2"}),
    ):
        after = side(method, net=AFTER_FROZEN, federation=FEATURES, **settings)
        name = f"frozen first layers are as good as their outputs as data, {method.name}, {settings.get('mix', '')}"
        yield name, side(method, net=FROZEN, **settings), after

    # fine-tuning without steps, and what the server holds with them: whatever is tuned comes after training
    weights = {"k": 3, "mix": "weights"}
    for name, method, population in (
        ("fedavg", ppfl.FedAvg(**SMALL), {"mix": "predictions"}),
        ("local", ppfl.Local(**SMALL), {}),
        ("fedadam", ppfl.FedAdam(**SMALL), {}),
        ("ditto of some clients", ppfl.Ditto(**SMALL, participation=0.3), {}),
        ("pfedme", ppfl.PFedMe(lr=0.05, batch_size=4, inner_steps=2), {}),
        ("ppfl", ppfl.PPFL(**SMALL), weights),
        ("private ppfl", private, weights),
        ("ppfl of the last layer", ppfl.PPFL(**SMALL, participation=0.5), {"k": 3, "canonical": "2"}),
        ("ppfl of the first layer", ppfl.PPFL(**SMALL), {"k": 3, "canonical": "0"}),
        ("ppfl after convolutions", ppfl.PPFL(**SMALL), {"k": 3, "canonical": "3", "net": IMAGES}),
    ):
        alone = side(method, **population)
        untuned, tuned = (side(ppfl.FineTune(method=method, steps=s), **population, rounds=5) for s in (0, 2))
        yield f"no steps after {name} leave it as it is", untuned, alone, losses
        if name != "local":
            yield f"steps after {name} leave its training as it is", tuned, alone, server


LIMITS = {name: limit for name, *limit in limits()}


@pytest.mark.parametrize("name", LIMITS)
def test_one_method_is_another(name):
    """All that the general method has is found in the special case; one network may stand for each of many."""
    special, general, what, *_ = *LIMITS[name], models
    tolerance = 1e-6 if "large tau" in name else 1e-9
    ours, theirs, before = what(special()), what(general()), what(general(), 0)
    assert any(not value.equal(before[name]) for name, value in theirs.items())  # else it is no wonder
    for leaf, value in theirs.items():
        one, other = torch.broadcast_tensors(ours[leaf], value)
        torch.testing.assert_close(one, other, atol=tolerance, rtol=10 * tolerance)
    if name.startswith("the collapse"):
        assert special().reports[0].bytes_up < general().reports[0].bytes_up
    if name.startswith("frozen"):
        assert special().reports[-1].bytes_up == general().reports[-1].bytes_up


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("averaging", ["members", "everyone"])
def test_frozen_one_hot_memberships_are_clustered_learning(mix, averaging):
    """Each canonical model is then FedAvg on its own clients; averaged over everyone, slowed by their share."""
    groups = torch.tensor([0, 1, 0, 1])
    training = {"lr": 0.2, "batch_size": 4, "weight_decay": 0.05 if averaging == "members" else 0.0}
    one_hot = nn.functional.one_hot(groups, 2).double()
    method = ppfl.PPFL(**training, **FIXED, averaging=averaging)
    found = side(method, k=2, mix=mix, rounds=1, alike=True, memberships=one_hot)()
    for k in (0, 1):
        cluster = FEDERATION.select([id for id, group in zip(FEDERATION.ids, groups, strict=True) if group == k])
        pace = 1.0 if averaging == "members" else float(weights_of(FEDERATION)[groups == k].sum())
        alone = models(side(ppfl.FedAvg(**training), federation=cluster, rounds=1)())
        for name, end in alone.items():
            start = NET.get_parameter(name).detach()
            torch.testing.assert_close(models(found)[name][k], start + pace * (end - start), atol=1e-7, rtol=1e-6)


class MixtureOfNetworks(nn.Module):
    """K networks and the logits of a membership, all as ordinary parameters."""

    def __init__(self, start, k, mix):
        super().__init__()
        self.mix, self.models = mix, nn.ModuleList(copy.deepcopy(NET) for _ in range(k))
        for i, model in enumerate(self.models):
            model.load_state_dict({name: theta[i] for name, theta in start.items()})
        self.membership = nn.ParameterDict({"logits": torch.zeros(k, dtype=torch.float64)})

    def forward(self, x):
        c = self.membership["logits"].softmax(0)
        outputs = torch.stack([model(x) for model in self.models])
        if self.mix == "outputs":
            return torch.tensordot(c, outputs, dims=1)
        return torch.tensordot(c, outputs.softmax(-1), dims=1).log()


@pytest.mark.parametrize(("mix", "k"), [("outputs", 2), ("predictions", 3)])
def test_without_penalty_ppfl_is_partial_personalization_with_the_membership_personal(mix, k):
    """A mirror step with eta from 1/K is a gradient step with K eta on logits, so the first round of both is one."""
    training = {"lr": 0.3, "batch_size": None, "schedule": "constant", "local_steps": 3}
    mirror = {"membership_lr": training["lr"] / k, "membership_steps": 1, "start": "uniform", "averaging": "everyone"}
    found = side(ppfl.PPFL(**training, **mirror), k=k, mix=mix, rounds=1)()
    net = MixtureOfNetworks(found.states[0].server.shared, k, mix)
    theirs = models(side(ppfl.FedAlt(**training, personal_steps=1, personal_part="membership"), net=net, rounds=1)())
    assert float((found.memberships - 1 / k).abs().amin(0).max()) > 1e-4
    torch.testing.assert_close(found.memberships, theirs["membership.logits"].softmax(1), atol=1e-9, rtol=1e-9)
    for name, theta in found.server.shared.items():
        for i in range(k):
            torch.testing.assert_close(theta[i], theirs[f"models.{i}.{name}"][0], atol=1e-9, rtol=1e-9)
