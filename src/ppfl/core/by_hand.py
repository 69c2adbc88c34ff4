"""What a population does with a chain of layers by hand: the outputs and the pushes of many clients' models at once.

The same numbers as torch.func's, which `Population` falls back on for other networks and without a workspace.
"""

from __future__ import annotations

from torch import Tensor

from .chain import Chain, chain_outputs, push_chain
from .losses import Loss
from .mixing import Mix
from .shared import Shared
from .workspace import Workspace


class ByHand:
    """A chain with the loss and the mix that follow it. Batches are x (C, B, ...), y (C, B), share (C, B)."""

    def __init__(self, chain: Chain, loss: Loss, mix: Mix) -> None:
        self.chain, self.loss, self.mix = chain, loss, mix

    def outputs_of_shared(self, shared: Shared, x: Tensor, space: Workspace) -> Tensor:
        """(K, out, B) of the K shared models for samples x (B, ...)."""
        models = {name: theta[None] for name, theta in shared.canonical.items()}
        return chain_outputs(self.chain, models, x[None], space)[0].clone()

    def outputs_of_networks(self, networks: Shared, x: Tensor, space: Workspace) -> Tensor:
        """(C, B, out) of one plain network a client."""
        models = {name: value[:, None] for name, value in networks.by_name().items()}
        return chain_outputs(self.chain, models, x, space)[:, 0].transpose(1, 2)

    def push_networks(
        self,
        networks: Shared,
        velocity: Shared,
        momentum: float,
        x: Tensor,
        y: Tensor,
        share: Tensor,
        space: Workspace,
        scale: Tensor | None,
    ) -> Tensor:
        """One plain network a client; gradients of its canonical part times `scale` (C,)."""

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.slopes(outputs[:, 0], y)
            return slope.mul_(share[:, None])[:, None], (losses * share).sum(1)

        models, onto = ({n: v[:, None] for n, v in tree.by_name().items()} for tree in (networks, velocity))
        scales = None if scale is None else dict.fromkeys(networks.canonical, scale[:, None, None])
        return push_chain(self.chain, models, onto, momentum, x, slopes, space, scales)

    def push_models(
        self,
        shared: Shared,
        velocity: Shared,
        momentum: float,
        c: Tensor,
        x: Tensor,
        y: Tensor,
        share: Tensor,
        space: Workspace,
        scale: Tensor | None,
    ) -> Tensor:
        """K models a client, mixed by c (C, K); gradients times `scale` (C,)."""
        weight = share if scale is None else share * scale[:, None]

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.mix.slopes(self.loss, outputs, c, y)
            return slope.mul_(weight[:, None, None]), (losses * share).sum(1)

        return push_chain(self.chain, shared.canonical, velocity.canonical, momentum, x, slopes, space)

    def push_weighted_models(
        self,
        shared: Shared,
        velocity: Shared,
        momentum: float,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        space: Workspace,
    ) -> Tensor:
        """K models a client, each by itself, with weights (C, K, B)."""

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.model_slopes(outputs, y)
            return slope.mul_(weights[:, :, None]), (losses * weights).sum((1, 2))

        return push_chain(self.chain, shared.canonical, velocity.canonical, momentum, x, slopes, space)
