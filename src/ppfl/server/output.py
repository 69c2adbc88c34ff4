"""Which round's state a run returns: the last, the best, or the random one of Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from ..core.draws import uniform
from ..errors import SettingError
from .loop import ServerState

OutputRule = Literal["last", "best", "random"]


class Kept(NamedTuple):
    """The state to return, and the criterion by which it was kept (smaller is better)."""

    state: ServerState
    criterion: float


def output_probabilities(
    etas: Sequence[float], theta_probability: float, smoothness: tuple[float, float] = (0.0, 0.0)
) -> torch.Tensor:
    """Eq. (10): P(t' = t) ∝ eta_t min_h rho_h (1 - gamma_h L_h), gamma_1 = 4 eta_t, gamma_2 = eta_t / 2.

    With unknown constants (0, 0) a round counts as its step does.
    """
    eta = torch.tensor(etas, dtype=torch.float64)
    theta = theta_probability * (1 - 4 * eta * smoothness[0])
    memberships = (1 - theta_probability) * (1 - eta / 2 * smoothness[1])
    weight = (eta * torch.minimum(theta, memberships)).clamp_min(0)
    if float(weight.sum()) == 0:
        raise SettingError(
            f"no round can be drawn: steps up to {float(eta.max()):g} exceed Theorem 2's bounds for smoothness "
            f"{smoothness}; use smaller steps or output = 'last'"
        )
    return weight / weight.sum()


def draw_output_round(probabilities: torch.Tensor, seed: int) -> int:
    """t' in 1..T, drawn before the run so that no trajectory has to be stored."""
    at = torch.searchsorted(probabilities.cumsum(0), float(uniform(seed, "output")), right=True)
    return int(at.clamp_max(len(probabilities) - 1)) + 1


def keep(rule: OutputRule, kept: Kept | None, state: ServerState, criterion: float, drawn_round: int) -> Kept:
    """The kept state after one more round."""
    chosen = {
        "last": True,
        "best": kept is None or criterion < kept.criterion,
        "random": kept is None or state.round == drawn_round,
    }[rule]
    return Kept(state, criterion) if chosen or kept is None else kept
