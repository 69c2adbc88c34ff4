"""Ways to call `fit` and `Fitted` that people try first: they work, or say in one line what to write."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Federation, Population, fit
from ppfl.algorithms import METHODS
from ppfl.core.errors import DataError, SettingError
from ppfl.data.sample_kind import SampleKind
from ppfl.fitted import load
from ppfl.server import DivergedWarning, warn_if_diverged

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)


def test_a_method_may_be_given_by_its_class_or_name() -> None:
    federation = make_federation((17, 12, 30, 9))
    fits = [fit(Population(make_net(), k=2), federation, method, rounds=2) for method in (None, PPFL, "ppfl", PPFL())]
    assert all(fitted.method == fits[0].method for fitted in fits)
    for fitted in fits[1:]:
        assert torch.equal(fitted.memberships, fits[0].memberships)
    assert isinstance(fit(Population(make_net(), k=1), federation, "fedavg", rounds=1).method, FedAvg)


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(SettingError, match="no method 'pfl'; use one of .*'ppfl'"):
        fit(Population(make_net(), k=2), FEDERATION, "pfl", rounds=1)
    with pytest.raises(SettingError, match=r"method is 3; give a method such as PPFL\(\)"):
        fit(Population(make_net(), k=2), FEDERATION, 3, rounds=1)


def test_every_method_has_a_default() -> None:
    from ppfl.fitting import method_of

    assert [type(method_of(name)) for name in METHODS] == list(METHODS.values())


@pytest.fixture(scope="module")
def numbered():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    federation = Federation.from_arrays(x, [0, 1, 2, 1] * 10, np.arange(40) % 4)
    return fit(Population(make_net(), k=2), federation, PPFL(lr=0.1), rounds=2)


def test_numbers_name_clients(numbered) -> None:
    x = torch.randn(3, 4)
    assert numbered.ids == ("0", "1", "2", "3")
    for client in (2, np.int64(2)):
        assert torch.equal(numbered.predict(client, x), numbered.predict("2", x))
        assert torch.equal(numbered.membership(client), numbered.membership("2"))
        assert torch.equal(numbered.model(client)(x), numbered.model("2")(x))
    with pytest.raises(DataError, match="no client '9' among the 4"):
        numbered.predict(9, x)


def test_arrays_in_give_arrays_out(numbered) -> None:
    x = torch.randn(3, 4)
    expected = numbered.predict("1", x)
    for given in (x.numpy(), x.double().numpy(), x.tolist()):
        found = numbered.predict("1", given)
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)
    read_only = x.numpy().copy()
    read_only.flags.writeable = False
    numbered.predict("1", read_only)  # no warning
    assert isinstance(expected, torch.Tensor) and numbered.predict("1", x.double()).dtype == torch.float32


def test_samples_of_another_shape_are_refused(numbered) -> None:
    with pytest.raises(DataError, match=r"shape \(3, 5\); expected a batch of samples of shape \(4,\): \(B, 4\)"):
        numbered.predict("1", torch.randn(3, 5))
    with pytest.raises(DataError, match=r"add a dimension: x\[None\]"):
        numbered.predict("1", torch.randn(4))
    for nonsense in ("text", [[1, 2], [3]], [object()]):
        with pytest.raises(DataError):
            numbered.predict("1", nonsense)


def test_training_that_diverged_is_said() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = fit(Population(make_net(), k=2), FEDERATION, PPFL(lr=1000.0), rounds=5)
    said = [str(w.message) for w in caught if issubclass(w.category, DivergedWarning)]
    assert len(said) == 1 and "lr = 1000" in said[0] and "smaller lr" in said[0]
    assert fitted.history[-1]["loss"] > 3 * fitted.history[0]["loss"]
    assert next(w.filename for w in caught if issubclass(w.category, DivergedWarning)) == __file__


@pytest.mark.parametrize(
    ("losses", "warns"),
    [
        ([1.0, 0.5], False),
        ([1.0, 2.5], False),
        ([1.0, 3.5], True),
        ([-1.0, 0.5], False),
        ([-1.0, 1.5], True),
        ([float("nan"), 1.0, 0.9], False),
        ([1.0, float("nan")], True),
        ([1.0, float("inf")], True),
        ([], False),
    ],
)
def test_when_training_has_diverged(losses: list[float], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_diverged(losses, lr=0.1)
    assert bool(caught) == warns


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_an_error_of_ours(tmp_path, numbered) -> None:
    for device in ("cuda", torch.device("cuda"), "cuda:3"):
        with pytest.raises(SettingError, match=r"device is 'cuda.*cannot be used here.*use 'cpu'"):
            FEDERATION.to(device)
    with pytest.raises(SettingError, match="device is 'gpu'"):
        FEDERATION.to("gpu")
    with pytest.raises(SettingError, match="device is 'cuda'"):
        load(numbered.save(tmp_path / "fitted"), device="cuda")


def test_evaluation_on_other_data_goes_by_id() -> None:
    """Other samples of the same clients, in another order, and some of the clients alone."""
    fitted = fit(Population(nn.Linear(4, 3), k=2), FEDERATION, PPFL(lr=0.3), rounds=3)
    other = make_federation((6, 9, 8, 5), seed=5).select(["client-3", "client-1"])
    found = fitted.evaluate(other, "train")
    for at, client in enumerate(other.ids):
        own = other.client(client)["train"]
        hits = (fitted.predict(client, own.x).argmax(1) == own.y).double().mean()
        assert float(found.score[at]) == pytest.approx(float(hits))
    x, y = torch.randn(6, 4), [0, 1, 2] * 2
    with pytest.raises(DataError, match=r"no client 'stranger'.*fitted\.onboard\(federation\)"):
        fitted.evaluate(Federation.from_arrays(x, y, ["client-0", "stranger"] * 3, test_fraction=0), "train")


def test_a_stand_in_has_the_form_of_the_data_and_nothing_else() -> None:
    kind = SampleKind.of(FEDERATION)
    like = kind.stand_in()
    assert SampleKind.of(like) == kind
    assert bool((like.train.x == 1).all()) and bool((like.train.y == 1).all())
