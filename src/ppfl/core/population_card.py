"""A population in a notebook: which parts of the network are common, canonical and frozen, and how they mix."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .card import Card, count_of, small_table

if TYPE_CHECKING:
    from .population import Population

NAMES = 4  # submodules that are named


class _Counts(NamedTuple):
    """Numbers of a network, of one copy."""

    common: int
    canonical: int
    frozen: int  # with buffers


def population_card(population: Population) -> Card:
    """The facts of a population."""
    counts, k = _counts(population), population.k
    facts = [
        ("network", type(population.net).__name__),
        ("canonical", _canonical(population)),
        ("k", str(k)),
        ("mix", population.mix.name),
        ("loss", f"{population.loss.name} (reported: {population.loss.metric_name})"),
    ]
    rows = [
        ["common, one for all clients", f"{counts.common:,}", f"{counts.common:,}"],
        [f"canonical, {k} cop{'y' if k == 1 else 'ies'}", f"{counts.canonical:,}", f"{k * counts.canonical:,}"],
        ["frozen, never trained or sent", f"{counts.frozen:,}", f"{counts.frozen:,}"],
    ]
    table = small_table(["parameters", "of one network", "in all"], rows)
    return Card(f"Population of {count_of(k, 'canonical model')}", facts, (table,))


def population_line(population: Population) -> str:
    """The facts in one line."""
    counts = _counts(population)
    return (
        f"<Population {type(population.net).__name__}, k={population.k}, canonical {_canonical(population)}, "
        f"mix={population.mix.name!r}, loss={population.loss.name!r}, parameters: {counts.common:,} common, "
        f"{counts.canonical:,} canonical, {counts.frozen:,} frozen>"
    )


def _canonical(population: Population) -> str:
    modules = population.canonical_modules
    if modules == ("",):
        return "the whole network"
    return ", ".join(map(repr, modules[:NAMES])) + (f" and {len(modules) - NAMES} more" if len(modules) > NAMES else "")


def _counts(population: Population) -> _Counts:
    net, common, canonical = population.net, 0, 0
    frozen = sum(buffer.numel() for buffer in net.buffers())
    for name, p in net.named_parameters():
        if name in population.canonical_names:
            canonical += p.numel()
        elif name in population.common_names:
            common += p.numel()
        else:
            frozen += p.numel()
    return _Counts(common, canonical, frozen)
