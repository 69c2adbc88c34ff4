"""Chains of linear layers by hand: the outputs and gradients of many clients' models at once.

The same numbers as `Autograd`'s, which does whatever a chain has no faster way for.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor
from torch.func import vmap

from ..population import Mixture, Networks, OneNetwork, Population
from ..trees import Params
from .autograd import SAMPLES_AT_ONCE, Autograd, Batch
from .layers import Chain, add_chain_gradients, chain_outputs

NUMBERS_AT_ONCE = 2**20  # more samples run together where that is few numbers


class Chained(Autograd):
    """A population whose network is a chain of layers that are all trained."""

    def __init__(self, population: Population, chain: Chain, x: Tensor, y: Tensor, n_classes: int | None) -> None:
        super().__init__(population, x, y, n_classes)
        self.chain = chain
        # K models with a common part share their first layers; torch.func runs these once
        self._models_by_hand = not population.common_names

    # ------------------------------------------------------------------ outputs

    def outputs_of(self, models: OneNetwork | Networks, x: Tensor) -> Tensor:
        if isinstance(models, OneNetwork):
            one = {name: value[None] for name, value in models.values.items()}
            parts = torch.split(x.flatten(0, 1), self._samples_at_once(one))
            together = torch.cat([self._by_hand(one, part)[0] for part in parts], dim=1).T
            return together.reshape(*x.shape[:2], -1)
        with self.space.frame():
            each = {name: value[:, None] for name, value in models.values.items()}
            return chain_outputs(self.chain, each, x, self.space)[:, 0].transpose(1, 2).clone()

    def _samples_at_once(self, models: Params) -> int:
        if not self._models_by_hand:
            return SAMPLES_AT_ONCE
        widest = max(len(theta[0]) for theta in models.values())
        return max(SAMPLES_AT_ONCE, NUMBERS_AT_ONCE // (self.population.k * widest))

    def _outputs_of_shared(self, models: Params, x: Tensor) -> Tensor:
        return self._by_hand(models, x) if self._models_by_hand else super()._outputs_of_shared(models, x)

    def _by_hand(self, models: Params, x: Tensor) -> Tensor:
        """(K, out, B) of models (K, ...)."""
        with self.space.frame():
            stacked = {name: theta[None] for name, theta in models.items()}
            return chain_outputs(self.chain, stacked, x[None], self.space)[0].clone()

    def _evaluate_mixture(self, mixture: Mixture, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.caches_outputs or not self.population.collapses:
            return super()._evaluate_mixture(mixture, x, y)
        with self.space.frame():
            outputs = self.outputs_of(Networks(self.mixed_weights(*mixture)), x)
        return vmap(lambda out, y: (self.loss.inverse_link(out), self.loss.per_sample(out, y)))(outputs, y)

    # ------------------------------------------------------------------ gradients for parameters

    def add_gradients(
        self,
        networks: Params,
        velocity: Params,
        momentum: float,
        batch: Batch,
        scale: Tensor | None = None,
        only: Container[str] | None = None,
    ) -> Tensor:
        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.slopes(outputs[:, 0], batch.y)
            return slope.mul_(batch.share[:, None])[:, None], (losses * batch.share).sum(1)

        models, onto = ({name: leaf[:, None] for name, leaf in tree.items()} for tree in (networks, velocity))
        scales = None if scale is None else dict.fromkeys(self.population.canonical_names, scale[:, None, None])
        with self.space.frame():
            return add_chain_gradients(self.chain, models, onto, momentum, batch.x, slopes, self.space, scales)

    def add_model_gradients(
        self, models: Params, velocity: Params, momentum: float, c: Tensor, batch: Batch, scale: Tensor | None = None
    ) -> Tensor:
        if not (self._models_by_hand and self.caches_outputs):
            return super().add_model_gradients(models, velocity, momentum, c, batch, scale)
        weight = batch.share if scale is None else batch.share * scale[:, None]

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.mix.slopes(self.loss, outputs, c, batch.y)
            return slope.mul_(weight[:, None, None]), (losses * batch.share).sum(1)

        with self.space.frame():
            return add_chain_gradients(self.chain, models, velocity, momentum, batch.x, slopes, self.space)

    def add_weighted_gradients(
        self, models: Params, velocity: Params, momentum: float, weights: Tensor, batch: Batch
    ) -> Tensor:
        if not self._models_by_hand:
            return super().add_weighted_gradients(models, velocity, momentum, weights, batch)

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.model_slopes(outputs, batch.y)
            return slope.mul_(weights[:, :, None]), (losses * weights).sum((1, 2))

        with self.space.frame():
            return add_chain_gradients(self.chain, models, velocity, momentum, batch.x, slopes, self.space)

    # ------------------------------------------------------------------ gradients for memberships

    def membership_gradients(self, models: Params, c: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        if not self.population.collapses:
            return super().membership_gradients(models, c, batch)
        with self.space.frame():  # df/dc_k = <G, theta_k>
            networks = self.mixed_weights(models, c)
            G = self.space.empty_like(networks)
            losses = self.add_gradients(networks, G, 0.0, batch)
            products = [
                G[name].flatten(1) @ theta.flatten(1).T
                for name, theta in models.items()
                if name in self.population.canonical_names
            ]
            return torch.stack(products).sum(0), losses
