"""Frozen layers run once per sample, and everything is the same as if they ran in every step."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ppfl.sites.frozen_features as frozen_features
from ppfl import PPFL, FedAvg, Federation, Population, fit
from ppfl.core.backends import Chained
from ppfl.core.frozen_layers import frozen_start
from ppfl.sites import Site, Stacked
from ppfl.sites.frozen_features import FeatureStore, fingerprint, sample_keys, watch_frozen_layers


class CountedLinear(nn.Linear):
    """It counts the samples that it sees."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).seen += len(x)
        return super().forward(x)


def make_net(trains_all: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm, conv = nn.BatchNorm2d(4), nn.Conv2d(1, 4, 3, padding=1)
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    backbone = nn.Sequential(conv, norm, nn.ReLU(), nn.Dropout(0.5), nn.MaxPool2d(2), nn.Flatten())
    backbone.eval().requires_grad_(trains_all)
    head = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


def make_federation(images: bool = False, clients: int = 5) -> Federation:
    random = torch.Generator().manual_seed(1)
    x = torch.rand(20 * clients, 1, 4, 4, generator=random)
    x = (255 * x).to(torch.uint8) if images else x
    y = torch.randint(3, (20 * clients,), generator=random)
    return Federation.from_arrays(x, y, torch.arange(20 * clients) % clients, validation_fraction=0.2)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedAvg(lr=0.1), {"k": 1}),
        (PPFL(lr=0.1), {"k": 2, "mix": "weights", "canonical": "head"}),
        (PPFL(lr=0.1), {"k": 2, "mix": "outputs", "canonical": "head.3"}),
    ],
)
def test_training_is_that_of_the_whole_network(
    method: Any, settings: dict[str, Any], images: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = make_federation(images)
    fits = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(frozen_features, "frozen_start", lambda net: ())
        fits.append(fit(Population(make_net(), **settings), federation, method, rounds=4, seed=0))
    short, long = fits
    for client in federation.ids[:2]:
        x = federation.client(client)["test"].x
        torch.testing.assert_close(short.predict(client, x), long.predict(client, x), rtol=1e-4, atol=1e-5)
    assert short.evaluate(federation).pooled == pytest.approx(long.evaluate(federation).pooled, abs=1e-6)
    assert {name for name, _ in short.model(federation.ids[0]).named_parameters()} == {
        name for name, _ in make_net().named_parameters()
    }


def test_every_sample_runs_through_frozen_layers_once() -> None:
    federation = make_federation()
    backbone = nn.Sequential(nn.Flatten(), CountedLinear(16, 5).requires_grad_(False))
    net = nn.Sequential(backbone, nn.ReLU(), nn.Linear(5, 3))
    samples = sum(len(split) for split in federation.splits.values())
    CountedLinear.seen = 0
    fitted = fit(Population(net, k=1), federation, FedAvg(lr=0.1), rounds=5)
    fitted.evaluate(federation)
    assert CountedLinear.seen == samples


def test_layers_after_frozen_ones_are_differentiated_by_hand_where_they_are_a_chain() -> None:
    federation = make_federation()
    net = nn.Sequential(make_net()[0], nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3)))
    site = Site(federation, Population(net, k=1), Stacked())
    assert isinstance(site.backend, Chained)


def linear(frozen: bool) -> nn.Linear:
    return nn.Linear(4, 4).requires_grad_(not frozen)


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (nn.Sequential(linear(True), nn.ReLU(), linear(True), nn.ReLU(), linear(False)), ("0", "1", "2")),
        (nn.Sequential(nn.Sequential(linear(True), nn.Sequential(linear(True), linear(False)))), ("0.0", "0.1.0")),
        (nn.Sequential(linear(False), linear(True)), ()),
        (nn.Sequential(nn.Flatten(), nn.ReLU(), linear(False)), ()),
        (nn.TransformerEncoderLayer(4, 1, 4, 0.0), ()),
    ],
)
def test_which_layers_run_once(net: nn.Module, names: tuple[str, ...]) -> None:
    assert frozen_start(net) == names


def test_layers_that_draw_or_are_watched_run_every_time() -> None:
    drawing = nn.Sequential(linear(True), nn.Dropout(0.5), linear(True), linear(False))
    assert frozen_start(Population(drawing, k=1).architecture) == ("0",)
    watched = nn.Sequential(linear(True), linear(False))
    watched[0].register_forward_hook(lambda *_: None)
    assert frozen_start(watched) == ()


def test_features_are_kept_in_files_that_other_runs_use(tmp_path: Path) -> None:
    layers, x = nn.Sequential(CountedLinear(3, 2)), torch.rand(700, 3)
    CountedLinear.seen = 0
    (first,) = FeatureStore(tmp_path).features(layers, [x])
    (again,) = FeatureStore(tmp_path).features(layers, [x])
    assert CountedLinear.seen == 700
    torch.testing.assert_close(again[:700], layers(x).detach())
    torch.testing.assert_close(first[:700], again[:700])
    for kind in ("*.npy", "*.keys"):
        (file,) = tmp_path.rglob(kind)
        file.write_bytes(file.read_bytes()[:100])
        (mended,) = FeatureStore(tmp_path).features(layers, [x])
        torch.testing.assert_close(mended[:700], layers(x).detach())
        (whole,) = FeatureStore(tmp_path).features(layers, [x])
        torch.testing.assert_close(whole[:700], layers(x).detach())


@pytest.mark.parametrize("in_files", [False, True])
def test_samples_are_found_again_in_any_order_and_split(tmp_path: Path, in_files: bool) -> None:
    layers, x = nn.Sequential(CountedLinear(3, 2)), torch.rand(90, 3)
    store = FeatureStore(tmp_path if in_files else None)
    store.features(layers, [x[:50], x[50:60]])
    CountedLinear.seen = 0
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    store = FeatureStore(tmp_path) if in_files else store
    for parts in ([x[order]], [x[order[:20]], x[order[20:40]].repeat(2, 1)], [x[:0], x[:7]]):
        for part, found in zip(parts, store.features(layers, parts), strict=True):
            torch.testing.assert_close(found[:], layers[0].weight.detach().matmul(part.T).T + layers[0].bias.detach())
    assert CountedLinear.seen == 0
    (mixed,) = store.features(layers, [x[order[:1]].repeat(3, 1).add(0)])
    assert len(mixed) == 3
    (found,) = store.features(layers, [x[torch.arange(89, 39, -1)]])  # 20 known ones, 30 new ones
    assert CountedLinear.seen == 30
    torch.testing.assert_close(found[:], layers(x[torch.arange(89, 39, -1)]).detach())


def test_progress_is_shown_sample_by_sample(tmp_path: Path) -> None:
    shown: list[tuple[int, int]] = []
    layers, images = nn.Sequential(nn.Conv2d(1, 2, 3)), torch.rand(70, 1, 4, 4)
    with watch_frozen_layers(lambda done, total: shown.append((done, total))):
        FeatureStore().features(layers, [images[:50], images[50:]])
    assert shown[-1] == (70, 70) and len(shown) > 2
    assert [done for done, _ in shown] == sorted({done for done, _ in shown})


def test_other_layers_or_kinds_of_samples_have_other_fingerprints() -> None:
    layers, x = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), torch.rand(5, 3)
    known = {fingerprint(layers, x)}
    assert fingerprint(layers, x[:2] + 1) in known
    known |= {fingerprint(layers, x.double()), fingerprint(layers, x[:, None])}
    layers[1].eval()
    known.add(fingerprint(layers, x))
    with torch.no_grad():
        layers[0].bias[0] += 1e-6
    known.add(fingerprint(layers, x))
    assert len(known) == 5


def test_other_samples_have_other_keys() -> None:
    x = torch.rand(5, 3)
    assert len({*sample_keys(x), *sample_keys(x + 1)}) == 10
    assert (sample_keys(x.clone()) == sample_keys(x)).all()
