"""One function for each chart: plain numbers in, a chart of Altair out. The page, a notebook and `save` use the same.

A chart of clients has a source of data called "chosen", which is empty. The page fills it to mark the client that was
chosen; `usermeta` says how ("bars", "simplex", "scores" or "pairs").
"""

from .clients import MAX_BARS, MAX_STEPS, corners, membership_history, memberships, of_sorted, shares, simplex
from .methods import client_scores, gains, history
from .models import coefficients, held_out_scores, plot_coefficients, plot_residuals, residuals
from .parts import MAX_DOTS, Chart

__all__ = [
    "MAX_BARS",
    "MAX_DOTS",
    "MAX_STEPS",
    "Chart",
    "client_scores",
    "coefficients",
    "corners",
    "gains",
    "held_out_scores",
    "history",
    "membership_history",
    "memberships",
    "of_sorted",
    "plot_coefficients",
    "plot_residuals",
    "residuals",
    "shares",
    "simplex",
]
