"""The reference backend: any network, by torch.func, or by torch's own tape where torch.func cannot run it.

Functions named `run*` speak of one client; the others of a chunk of clients, whose tensors have a leading dimension C.
All are pure but for those that write to a velocity they are given. A `key` (or keys (C,)) draws dropout masks; without
one dropout is off.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from ...errors import ModelError
from ..dropout import key_names, refuse_side_effects
from ..mixing import MembershipLoss
from ..parts import refuse_outputs, run_and_watch, with_mixed_modules
from ..population import Mixture, Models, Networks, OneNetwork, Population
from ..trees import Params, accumulate_, expand, weighted_sum
from ..workspace import Workspace
from .networks import ClientMap, FunctionalNetwork

SAMPLES_AT_ONCE = 2048  # samples that run through shared models in one product
BLOCK_OUTPUTS = 64 * 2**20  # bytes of outputs in a block of samples: a word of a large vocabulary has many


class Batch(NamedTuple):
    """Some samples of each of C clients, padded to a rectangle."""

    x: Tensor  # (C, B, ...), of the first C clients of a chunk
    y: Tensor  # (C, B, ...)
    share: Tensor  # (C, B), of each sample in its client's mean: sums to 1, and is 0 for padding
    real: Tensor  # (C,), samples that are no padding
    rows: Tensor  # (C, B), where in the data each sample stands, for what is kept sample by sample
    keys: Tensor | None  # (C,), for dropout masks; None: dropout is off


class Autograd:
    """A population on data of a known shape."""

    def __init__(self, population: Population, x: Tensor, y: Tensor, n_classes: int | None) -> None:
        """Runs the network once on a few samples x (N, ...), and refuses one that does not fit the data."""
        population.loss.check_target(y)
        self.population, self.loss, self.mix = population, population.loss, population.mix
        self._local = threading.local()
        self._plain = FunctionalNetwork(population.net, x.device)
        try:
            refuse_side_effects(self._plain.net, x[:2])
            output, ends = run_and_watch(self._plain.net, x[:2], population.canonical_modules)
        except (RuntimeError, TypeError, IndexError) as error:
            flat = x.dim() == 3 and any(isinstance(module, nn.Conv2d) for module in population.net.modules())
            advice = "give images an axis for their channels: x[:, None]" if flat else "change its input or the data"
            raise ModelError(
                f"the network cannot run on the data (samples of shape {tuple(x.shape[1:])}, {x.dtype}): "
                f"{str(error).splitlines()[0]}; {advice}"
            ) from None
        refuse_outputs(self.loss, output, y[:2], n_classes)
        self.output_bytes = output[0].numel() * output.element_size()  # of one sample
        self._canonical_ends_net = population.canonical_modules == ("",) or ends
        self.clients = ClientMap(self._plain.net, x[:2])
        self.clients.try_vmap(self._network_loss, *self._two_clients(x[:2], y[:2]))
        mixed = with_mixed_modules(population.net, population.canonical_modules, self.clients.one_by_one)
        self._mixed, self._mixed_keys = FunctionalNetwork(mixed, x.device), key_names(mixed)

    def _two_clients(self, x: Tensor, y: Tensor) -> tuple[Params, *tuple[Tensor, ...]]:
        """Two clients with the same network and the same few samples, to try out how networks run."""
        networks = {name: value.to(x.device) for name, value in self.population.initial_network().items()}
        share = next(iter(networks.values())).new_full((2, len(x)), 1 / len(x))
        keys = (torch.arange(2, device=x.device),) if self.population.mask_keys else ()
        return (expand(networks, 2), torch.stack([x, x]), torch.stack([y, y]), share, *keys)

    @property
    def space(self) -> Workspace:
        """This thread's buffers."""
        if not hasattr(self._local, "space"):
            self._local.space = Workspace()
        space: Workspace = self._local.space
        return space

    @property
    def caches_outputs(self) -> bool:
        """Whether f_i depends on theta through the K outputs alone, so that they can be kept (short cut 2)."""
        return self.mix.caches_outputs and (self._canonical_ends_net or self.mix.takes_any_part)

    @property
    def keeps_outputs(self) -> bool:
        """Whether memberships move on kept outputs; with some losses a few numbers per sample are enough."""
        return self.caches_outputs and self.mix.needs_outputs(self.loss)

    def samples_per_block(self, clients: int, models: int = 1) -> int:
        """How many samples of each of so many clients to take at once, where each runs through so many models."""
        return max(1, min(SAMPLES_AT_ONCE, BLOCK_OUTPUTS // (clients * models * self.output_bytes)))

    # ------------------------------------------------------------------ one client

    def run(self, network: Params, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Output (B, ...) of one network."""
        return self._plain(_with_keys(network, self.population.mask_keys, key), x)

    def run_models(self, models: Params, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs of all K models, (K, B, ...); layers before the canonical part run once."""
        common, canonical = self.population.split(models)
        if self.clients.one_by_one:
            each = (dict(zip(canonical, model, strict=True)) for model in zip(*canonical.values(), strict=True))
            return torch.stack([self.run({**common, **theta}, x, key) for theta in each])
        outputs: Tensor = vmap(lambda theta: self.run({**common, **theta}, x, key), randomness="error")(canonical)
        return outputs

    def run_mixed_outputs(self, models: Params, c: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Fig. 2a: the weighted sum of the canonical outputs is passed to the next layer."""
        if self._canonical_ends_net:
            return weighted_sum(c, self.run_models(models, x, key))
        common, canonical = self.population.split(models)
        modules = self.population.canonical_modules
        values = dict(common)
        for name, value in canonical.items():
            module = next(m for m in modules if name.startswith(m + "."))
            values[f"{module}.inner{name[len(module) :]}"] = value
        values |= {f"{module}.membership": c for module in modules}
        return self._mixed(_with_keys(values, self._mixed_keys, key), x)

    # ------------------------------------------------------------------ predictions and losses

    def mixed_weights(self, models: Params, c: Tensor) -> Params:
        """One network per client, leaves (C, ...), in this thread's workspace: W_i = sum_k c_ik theta_k for the
        canonical part (Eq. 8), copies of the common part."""
        common, canonical = self.population.split(models)
        networks = self.space.copies(common, len(c))
        for name, theta in canonical.items():
            networks[name] = self.space.empty((len(c), *theta.shape[1:]), theta)
            torch.mm(c, theta.flatten(1), out=networks[name].view(len(c), -1))
        return networks

    def evaluate(self, models: Models, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Mean predictions (C, B, ...) and losses (C, B) of every client on its batch, each network run once."""
        if isinstance(models, Mixture) and (self.caches_outputs or not self.population.collapses):
            return self._evaluate_mixture(models, x, y)
        with self.space.frame():
            networks = Networks(self.mixed_weights(*models)) if isinstance(models, Mixture) else models
            outputs = self.outputs_of(networks, x)
        return vmap(lambda out, y: (self.loss.inverse_link(out), self.loss.per_sample(out, y)))(outputs, y)

    def predict(self, models: Models, x: Tensor) -> Tensor:
        """Mean predictions (C, B, ...) on x (C, B, ...)."""
        if not isinstance(models, Mixture):
            return self.loss.inverse_link(self.outputs_of(models, x))

        def of_client(models: Params, c: Tensor, x: Tensor) -> Tensor:
            return self.mix.predictions(self.loss, self.mix.run(self, models, c, x, None), c)

        predictions: Tensor = self.clients.each(of_client, False, models.models, models.memberships, x)
        return predictions

    def outputs_of(self, models: OneNetwork | Networks, x: Tensor) -> Tensor:
        """Outputs (C, B, ...) of one network per client, or of the same one for all."""
        if isinstance(models, Networks):
            outputs: Tensor = self.clients.each(self.run, True, models.values, x)
            return outputs
        parts = torch.split(x.flatten(0, 1), SAMPLES_AT_ONCE)
        together = torch.cat([self.run(models.values, self.clients.laid_out(part)) for part in parts])
        return together.reshape(*x.shape[:2], *together.shape[1:])

    def outputs(self, models: Params, x: Tensor) -> Tensor:
        """Outputs (C, K, ..., B) of the shared models on every client's x (C, B, ...). Samples are last."""
        clients, batch = x.shape[:2]
        parts = torch.split(x.flatten(0, 1), self._samples_at_once(models))
        found = [self._outputs_of_shared(models, part) for part in parts]
        together = found[0] if len(found) == 1 else torch.cat(found, dim=-1)  # (K, ..., C B)
        return together.reshape(*together.shape[:-1], clients, batch).movedim(-2, 0).contiguous()

    def _samples_at_once(self, models: Params) -> int:
        return SAMPLES_AT_ONCE

    def _outputs_of_shared(self, models: Params, x: Tensor) -> Tensor:
        """(K, ..., B) for samples x (B, ...) of any clients; (K, 1, B) where an output is one number."""
        outputs = self.run_models(models, self.clients.laid_out(x))
        return (outputs[:, :, None] if outputs.dim() == 2 else outputs).movedim(1, -1)

    def _evaluate_mixture(self, mixture: Mixture, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def of_run(ran: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.mix.predictions(self.loss, ran, c), self.mix.losses(self.loss, ran, c, y)

        def of_client(models: Params, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return of_run(self.mix.run(self, models, c, x, None), c, y)

        models, c = mixture
        if self.caches_outputs:
            outputs = self.outputs(models, x).movedim(-1, 2)
            return vmap(lambda outputs, c, y: of_run(self.mix.of_outputs(outputs, c), c, y))(outputs, c, y)
        predictions, losses = self.clients.each(of_client, False, models, c, x, y)
        return predictions, losses

    # ------------------------------------------------------------------ gradients for parameters

    def add_gradients(
        self, networks: Params, velocity: Params, momentum: float, batch: Batch, only: Container[str] | None = None
    ) -> Tensor:
        """velocity <- momentum velocity + gradient of one network per client, in place; returns the losses (C,).

        `only`: the parameters whose velocity is needed, where not all are; that of others may then hold anything.
        """
        gradient, losses = self.clients.gradients(self._network_loss, True, networks, *_rows(batch), only=only)
        accumulate_(velocity, momentum, gradient)
        return losses

    def add_model_gradients(self, models: Params, velocity: Params, momentum: float, c: Tensor, batch: Batch) -> Tensor:
        """The same for all K models of each client, mixed by c (C, K): canonical leaves (C, K, ...)."""
        gradient, losses = self.clients.gradients(self._mean_loss, True, models, c, *_rows(batch))
        accumulate_(velocity, momentum, gradient)
        return losses

    def add_weighted_gradients(
        self, models: Params, velocity: Params, momentum: float, weights: Tensor, batch: Batch
    ) -> Tensor:
        """The same for K models that are not mixed: sum_k sum_n weights_kn loss_kn, with weights (C, K, B)."""

        def weighted_loss(
            models: Params, weights: Tensor, x: Tensor, y: Tensor, _share: Tensor, *key: Tensor
        ) -> Tensor:
            losses = [self.loss.per_sample(output, y) for output in self.run_models(models, x, *key)]
            return (torch.stack(losses) * weights).sum()

        gradient, losses = self.clients.gradients(weighted_loss, True, models, weights, *_rows(batch))
        accumulate_(velocity, momentum, gradient)
        return losses

    def _network_loss(self, network: Params, x: Tensor, y: Tensor, share: Tensor, *key: Tensor) -> Tensor:
        """The loss of one network that is not mixed, as in `_mean_loss`."""
        return (self.loss.per_sample(self.run(network, x, *key), y) * share).sum()

    def _mean_loss(
        self, models: Params, c: Tensor, x: Tensor, y: Tensor, share: Tensor, key: Tensor | None = None
    ) -> Tensor:
        """f_i on a batch: sum_n share_n loss_n, where shares (B,) sum to 1 and padding has none."""
        return (self.mix.losses(self.loss, self.mix.run(self, models, c, x, key), c, y) * share).sum()

    # ------------------------------------------------------------------ gradients for memberships

    def membership_gradients(self, models: Params, c: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """df_i/dc_i, (C, K), and the losses (C,); none for theta (short cut 4). <G, theta_k> where weights are mixed,
        with the gradient G of the mixed network."""
        if not self.population.collapses:
            gradient, losses = self.clients.gradients(
                lambda at, *rows: self._mean_loss(models, at["c"], *rows), True, {"c": c}, *_rows(batch)
            )
            return gradient["c"], losses
        canonical = self.population.canonical_names
        with self.space.frame():
            networks = self.mixed_weights(models, c)
            G = self.space.empty_like(networks)
            losses = self.add_gradients(networks, G, 0.0, batch, only=canonical)
            products = [G[name].flatten(1) @ models[name].flatten(1).T for name in models if name in canonical]
            return torch.stack(products).sum(0), losses

    def membership_loss(self, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        """f_i as a function of c_i alone, from kept outputs (C, K, ..., B): the network is not touched again."""
        return self.mix.membership_loss(self.loss, outputs, y, share)


def _rows(batch: Batch) -> list[Tensor]:
    """What a function of one client takes of a batch."""
    return [batch.x, batch.y, batch.share, *([] if batch.keys is None else [batch.keys])]


def _with_keys(values: Params, names: Sequence[str], key: Tensor | None) -> Params:
    return values if key is None or not names else {**values, **dict.fromkeys(names, key)}
