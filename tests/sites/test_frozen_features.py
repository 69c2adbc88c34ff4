"""Frozen layers run once per sample, and everything is the same as if they ran in every step."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import ppfl.sites.frozen_features as frozen_features
from kit.networks import with_seed
from kit.refusals import ModelError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Population, fit
from ppfl.sites.frozen_features import FeatureStore, fingerprint, run_frozen_layers, sample_keys, watch_frozen_layers


class CountedLinear(nn.Linear):
    seen = 0  # samples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).seen += len(x) if len(x) != 2 else 0  # two are for trying out the layers
        return super().forward(x)


def pretrained() -> nn.Sequential:
    norm, conv = nn.BatchNorm2d(4), nn.Conv2d(1, 4, 3, padding=1)
    norm.running_mean.uniform_(-1, 1)
    backbone = nn.Sequential(conv, norm, nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten())
    head = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    return nn.Sequential(OrderedDict(backbone=backbone.eval().requires_grad_(False), head=head))


def make_federation(images: bool = False) -> Federation:
    random = torch.Generator().manual_seed(1)
    x, y = torch.rand(100, 1, 4, 4, generator=random), torch.randint(3, (100,), generator=random)
    x = (255 * x).to(torch.uint8) if images else x
    return Federation.from_arrays(x, y, torch.arange(100) % 5, validation_fraction=0.2)


@pytest.mark.parametrize(("mix", "canonical", "images"), [("weights", "head", False), ("outputs", "head.3", True)])
def test_training_is_that_of_the_whole_network(mix, canonical, images, monkeypatch):
    federation, net = make_federation(images), with_seed(pretrained, dtype=torch.float32)
    population = Population(net, k=2, mix=mix, canonical=canonical)
    short = fit(population, federation, PPFL(lr=0.1), rounds=4, seed=0)
    monkeypatch.setattr(frozen_features, "first_frozen_layers", lambda net: ())
    long = fit(Population(net, k=2, mix=mix, canonical=canonical), federation, PPFL(lr=0.1), rounds=4, seed=0)
    for client in federation.ids[:2]:
        x = federation.client(client)["test"].x
        torch.testing.assert_close(short.predict(client, x), long.predict(client, x), rtol=1e-4, atol=1e-5)
    assert short.evaluate(federation).pooled == pytest.approx(long.evaluate(federation).pooled, abs=1e-6)
    model = short.model(federation.ids[0])
    network = model.network if images else model  # a layer that scales bytes stands before it
    assert dict(network.named_parameters()).keys() == dict(net.named_parameters()).keys()


def test_every_sample_runs_through_frozen_layers_once():
    federation, CountedLinear.seen = make_federation(), 0
    backbone = nn.Sequential(nn.Flatten(), CountedLinear(16, 5).requires_grad_(False))
    population = Population(nn.Sequential(backbone, nn.ReLU(), nn.Linear(5, 3)), k=1)
    fit(population, federation, FedAvg(lr=0.1), rounds=5).evaluate(federation)
    assert CountedLinear.seen == sum(len(split) for split in federation.splits.values())


def chain(*parts: bool | nn.Module) -> nn.Sequential:
    """Layers that are frozen (False) or train (True), and others."""
    return nn.Sequential(*(nn.Linear(4, 4).requires_grad_(p) if isinstance(p, bool) else p for p in parts))


def test_frozen_layers_at_the_start_run_once():
    watched = chain(False, True)
    watched[0].register_forward_hook(lambda *_: None)
    once = {
        "0 1 2": chain(False, nn.ReLU(), False, nn.ReLU(), True),
        "0.0 0.1.0": chain(chain(False, chain(False, True))),
        "0": Population(chain(False, nn.Dropout(0.5), False, True), k=1).architecture,  # up to what draws
    }
    for names, net in once.items():
        assert frozen_features.first_frozen_layers(net) == tuple(names.split())
    for net in (chain(True, False), nn.TransformerEncoderLayer(4, 1, 4, 0.0), watched):
        assert frozen_features.first_frozen_layers(net) == ()


class HiddenDropout(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x))


def test_frozen_layers_that_draw_are_refused():
    net = nn.Sequential(HiddenDropout(4, 4).requires_grad_(False), nn.Flatten(), nn.Linear(16, 3))
    assert_refused(lambda: run_frozen_layers(Population(net, k=1), make_federation()), ModelError, "HiddenDropout")


def drawn(samples: int) -> torch.Tensor:
    return torch.rand(samples, 3, generator=torch.Generator().manual_seed(0))


def test_features_are_kept_in_files_that_other_runs_use_and_damaged_ones_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PPFL_CACHE", str(tmp_path))
    layers, x, CountedLinear.seen, done = nn.Sequential(CountedLinear(3, 2)), drawn(700), 0, []
    expected = (x @ layers[0].weight.T + layers[0].bias).detach()
    for damaged in ("", "*.npy", "*.keys"):
        if damaged:
            (file,) = tmp_path.rglob(damaged)
            file.write_bytes(file.read_bytes()[:100])
        for _ in range(2):
            with watch_frozen_layers(lambda *samples: done.append(samples)):
                (found,) = FeatureStore().features(layers, [x])
            torch.testing.assert_close(found[:700], expected)
        assert damaged or CountedLinear.seen == 700
        assert done == sorted({*done}) and done[-1] == (700, 700)
        done.clear()


@pytest.mark.parametrize("in_files", [False, True])
def test_samples_are_found_again_in_any_order_and_split(tmp_path, monkeypatch, in_files: bool):
    monkeypatch.setenv("PPFL_CACHE", str(tmp_path) if in_files else "")
    layers, x = nn.Sequential(CountedLinear(3, 2)), drawn(90)
    store = FeatureStore()
    store.features(layers, [x[:50], x[50:60]])
    store = FeatureStore() if in_files else store  # as another run has it
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    known = [x[order]], [x[order[:20]], x[order[20:40]].repeat(2, 1)], [x[:0], x[:7]]
    for parts, new in (*((parts, 0) for parts in known), ([x.flip(0)[:50]], 30)):  # at last 20 known ones, 30 new ones
        CountedLinear.seen = 0
        features = store.features(layers, parts)
        assert CountedLinear.seen == new
        for part, found in zip(parts, features, strict=True):
            torch.testing.assert_close(found[:], layers(part).detach())


def test_other_layers_samples_or_kinds_of_samples_are_not_mistaken_for_these():
    layers, x = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), drawn(5)
    known = {fingerprint(layers, x)}
    assert fingerprint(layers, x[:2] + 1) in known
    known |= {fingerprint(layers, x.double()), fingerprint(layers, x[:, None])}
    known.add(fingerprint(layers.eval(), x))
    layers[0].bias.data[0] += 1e-6
    known.add(fingerprint(layers, x))
    assert len(known) == 5
    assert len({*sample_keys(x), *sample_keys(x + 1)}) == 10 and (sample_keys(x.clone()) == sample_keys(x)).all()
