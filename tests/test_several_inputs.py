"""Samples with several inputs: the network gets them by name or in order, and every result is that of the same network
on one tensor that it takes apart by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ppfl
from ppfl import PPFL, Federation, Population, fit
from ppfl.core.errors import DataError, ModelError

TOKENS = torch.randint(0, 9, (60, 5), generator=torch.Generator().manual_seed(0))
AGE = torch.linspace(-1, 1, 60)
Y, IDS = (TOKENS[:, 0] > 4).long(), [f"c{i % 6}" for i in range(60)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(5, 2)

    def forward(self, tokens: Tensor, age: Tensor) -> Tensor:
        assert not tokens.is_floating_point()
        return self.head(torch.cat([self.embed(tokens).mean(1), age[:, None]], dim=1))


class Joined(Net):
    """The same on tokens and age in one tensor of whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :5], x[:, 5].float() / 1000)


def several(x=None) -> Federation:
    return Federation.from_arrays({"tokens": TOKENS, "age": AGE} if x is None else x, Y, IDS)


@pytest.mark.parametrize("mix", ["weights", "outputs", "predictions"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_result_is_that_of_one_tensor_taken_apart_by_the_network(mix, engine):
    age = (AGE * 1000).round()
    federation = several({"tokens": TOKENS, "age": age / 1000})
    joined = Federation.from_arrays(torch.cat([TOKENS, age.long()[:, None]], dim=1), Y, IDS, tokens=True)
    how = {"k": 2, "canonical": "head", "mix": mix}
    method = PPFL(lr=0.1, batch_size=4)
    ours = fit(Population(Net(), inputs=federation.inputs, **how), federation, method, rounds=4, engine=engine)
    other = fit(Population(Joined(), **how), joined, method, rounds=4, engine=engine)
    torch.testing.assert_close(ours.memberships, other.memberships)
    for name, leaf in ours.state.server.shared.items():
        torch.testing.assert_close(leaf, other.state.server.shared[name])
    assert ours.evaluate(federation).pooled == pytest.approx(other.evaluate(joined).pooled)


def test_inputs_in_order_are_those_by_name():
    named, ordered = several(), several((TOKENS, AGE))
    assert ordered.inputs.names == ("0", "1") and torch.equal(named.train.x, ordered.train.x)
    fitted = [fit(Population(Net(), k=2, inputs=f.inputs), f, PPFL(lr=0.1), rounds=2) for f in (named, ordered)]
    x = {"tokens": TOKENS[:3], "age": AGE[:3]}
    assert torch.equal(fitted[0].memberships, fitted[1].memberships)
    assert np.array_equal(fitted[0].predict("c0", x), fitted[1].predict("c0", (TOKENS[:3], AGE[:3])))


def test_a_fit_is_saved_and_one_clients_model_takes_the_networks_own_arguments(tmp_path: Path):
    federation = several()
    fitted = fit(Population(Net(), k=2, mix="weights", inputs=federation.inputs), federation, PPFL(lr=0.1), rounds=2)
    again = ppfl.load(fitted.save(tmp_path / "fit.safetensors"), net=Net())
    x = {"tokens": TOKENS[:3].tolist(), "age": AGE[:3].tolist()}
    assert np.array_equal(again.predict("c1", x), fitted.predict("c1", x))
    with torch.no_grad():
        own = again.model("c1")(tokens=TOKENS[:3], age=AGE[:3]).softmax(1)
    np.testing.assert_allclose(own.numpy(), fitted.predict("c1", x), atol=1e-6)


def test_ragged_tokens_may_be_one_of_the_inputs():
    federation = several({"tokens": [row.tolist()[: 1 + at % 5] for at, row in enumerate(TOKENS)], "age": AGE})
    assert federation.inputs.describe() == "tokens (5,), age ()"
    assert "x tokens (5,), age ()" in federation.describe()
    assert federation.select(["c1"]).inputs == federation.inputs


@pytest.mark.parametrize(
    ("x", "error"),
    [
        ({"tokens": TOKENS}, "of 1 inputs; give a single one as x itself"),
        ({"tokens": TOKENS, "age": AGE[:9]}, "tokens 60, age 9"),
        ({"tokens": TOKENS + 2**25, "age": AGE}, "above 16,777,216"),
        ({"my tokens": TOKENS, "age": AGE}, "'my tokens'"),
        ({"tokens": TOKENS, "age": [[1.0], [1.0, 2.0]] * 30}, "input 'age'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, error):
    with pytest.raises(DataError, match=error):
        several(x)


def test_a_population_for_other_inputs_is_refused():
    with pytest.raises(ModelError, match="tokens \\(5,\\), age \\(\\).*inputs=federation.inputs"):
        fit(Population(Net(), k=2), several(), rounds=1)
    fitted = fit(Population(Net(), k=1, inputs=several().inputs), several(), "fedavg", rounds=1)
    with pytest.raises(DataError, match="expected tokens, age"):
        fitted.predict("c0", {"tokens": TOKENS, "ages": AGE})
