"""Predictions without clients are those of strangers, which nobody should get by accident."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.metrics import get_scorer
from sklearn.utils.metadata_routing import MetadataRequest

NEW = "new"  # clients=NEW asks for the predictions of a client without data


class MissingClientsWarning(UserWarning):
    """A model with memberships was used without clients.

    >>> from ppfl.glm import PopulationRegressor
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     model = PopulationRegressor(k=2).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 0.0])
    >>> caught[0].category.__name__
    'MissingClientsWarning'
    """


def warn_of_prediction_without_clients(k: int) -> None:
    _warn(
        f"no clients were given to a model of {k} canonical models, so every row is predicted as of a new client. Pass "
        f"clients=ids, or clients='new' if this is what you want. In cross-validation: "
        f"sklearn.set_config(enable_metadata_routing=True), "
        f"model.set_fit_request(clients=True).set_score_request(clients=True) and params={{'clients': ids}}; "
        f"for scoring='...' give scoring=ppfl.glm.client_scorer('...') instead"
    )


def warn_of_fit_without_clients(k: int) -> None:
    _warn(
        f"k is {k} but no clients were given, so this is a plain GLM with one model for all rows; pass clients=ids, "
        f"or set k=1"
    )


def _warn(message: str) -> None:
    """Shown at the first line outside this package."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ppfl."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MissingClientsWarning, stacklevel=level)


class ClientScorer:
    """One of scikit-learn's scorers, which asks for `clients`."""

    def __init__(self, name: str) -> None:
        self.name, self._scorer = name, get_scorer(name)

    def __call__(self, estimator: Any, X: Any, y: Any, clients: Any = None, **more: Any) -> float:
        return float(self._scorer(_WithClients(estimator, clients), X, y, **more))

    def get_metadata_routing(self) -> Any:
        request = MetadataRequest(owner=self)
        request.score.add_request(param="clients", alias=True)
        return request

    def __repr__(self) -> str:
        return f"client_scorer({self.name!r})"


def client_scorer(name: str) -> ClientScorer:
    """One of scikit-learn's scorers by its name, for predictions with each row's client.

    scikit-learn passes no metadata to `predict`, so a scorer by name would score every row as of a new client. This one
    asks for `clients` in cross-validation and searches, with metadata routing enabled.

    >>> client_scorer("neg_root_mean_squared_error")
    client_scorer('neg_root_mean_squared_error')
    """
    return ClientScorer(name)


class _WithClients(BaseEstimator):  # type: ignore[misc]
    """A fitted model that predicts for these clients."""

    def __init__(self, model: Any, clients: Any) -> None:
        self.model, self.clients = model, clients

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __sklearn_tags__(self) -> Any:
        return self.model.__sklearn_tags__()

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, X: Any) -> Any:
        return self.model.predict(X, clients=self.clients)

    def predict_proba(self, X: Any) -> Any:
        return self.model.predict_proba(X, clients=self.clients)
