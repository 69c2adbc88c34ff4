"""The federated solver depends on `random_state` alone."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from ppfl.glm import PopulationRegressor


def test_a_federated_fit_does_not_depend_on_the_state_of_torchs_generator() -> None:
    rng = np.random.default_rng(0)
    X, clients = rng.normal(size=(80, 2)), np.repeat(list("abcd"), 20)
    y = X @ [1.0, -1.0] + rng.normal(size=80)
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        model = PopulationRegressor(k=2, solver="federated", max_iter=3, random_state=5)
        with pytest.warns(ConvergenceWarning):
            found.append(model.fit(X, y, clients=clients).canonical_coef_)
    np.testing.assert_array_equal(*found)
