"""What is done to parameters by name."""

import torch

from ppfl.core.params import (
    accumulate_,
    expand,
    first_clients,
    map_params,
    per_client,
    subtract_,
    weighted_sum,
)

G = torch.Generator().manual_seed(0)
PARAMS = {"weight": torch.randn(3, 2, generator=G), "bias": torch.randn(3, generator=G)}


def test_a_function_of_several_trees_takes_leaves_of_the_same_name_in_whatever_order() -> None:
    turned = dict(reversed(PARAMS.items()))
    found = map_params(torch.sub, PARAMS, turned)
    assert list(found) == list(PARAMS)
    assert not any(bool(leaf.any()) for leaf in found.values())


def test_expanded_parameters_share_their_memory_and_the_first_clients_are_views() -> None:
    each = expand(PARAMS, 5)
    for name, leaf in first_clients(each, 2).items():
        assert leaf.shape == (2, *PARAMS[name].shape)
        assert leaf.data_ptr() == PARAMS[name].data_ptr()


def test_a_change_is_end_less_start_in_place() -> None:
    ends = {name: torch.stack([leaf + 1, leaf + 2]) for name, leaf in PARAMS.items()}
    changes = subtract_(ends, PARAMS)
    for name, change in changes.items():
        assert change is ends[name]
        torch.testing.assert_close(change, per_client(torch.tensor([1.0, 2.0]), change).expand_as(change))


def test_with_momentum_0_what_a_velocity_holds_does_not_matter() -> None:
    velocity = map_params(lambda leaf: torch.full_like(leaf, torch.nan), PARAMS)
    accumulate_(velocity, 0.0, PARAMS)
    assert all(velocity[name].equal(leaf) for name, leaf in PARAMS.items())
    accumulate_(velocity, 0.5, PARAMS)
    for name, leaf in PARAMS.items():
        torch.testing.assert_close(velocity[name], 1.5 * leaf)


def test_a_weighted_sum_of_many_rows_is_that_of_each() -> None:
    values, c = torch.randn(4, 3, 2, generator=G), torch.rand(5, 4, generator=G)
    many = weighted_sum(c, values)
    for row, expected in zip(many, c, strict=True):
        torch.testing.assert_close(row, sum(expected[k] * values[k] for k in range(4)))
        torch.testing.assert_close(weighted_sum(expected, values), row)
