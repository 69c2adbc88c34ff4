"""Memory follows the clients at work: a registered client costs a few numbers, however large its data and its state."""

import gc
from contextlib import suppress

import pytest
import registered
import torch

from ppfl.server import InProcess, begin, make_problem, train
from ppfl.sites import Site, Stacked

AT_WORK, FEW, MANY = 20, 1_000, 11_000
# key, offset and importance (8 bytes each), weights, where its state and norms are, its degree in the affinity, the
# round it came in (4 each); besides them what is shown to the server, now and before (4 K each)
MOST_BYTES = 60


def live_bytes(case: registered.Case, clients: int) -> int:
    """Of all tensors, after three rounds in which as many clients take part whatever the number of registered ones."""
    gc.collect()
    before = _bytes_of_tensors()
    population = case.population()
    transport = InProcess(Site(case.federation(clients), population, Stacked(), states_on_disk=True))
    problem = make_problem(population, transport, rounds=3)
    method = case.method(AT_WORK / clients)
    for _state, report in train(method, problem, transport, begin(method, problem, transport)):
        assert report.participants in (AT_WORK, 10 * population.k)  # the first round may be a survey
    gc.collect()
    return _bytes_of_tensors() - before


def _bytes_of_tensors() -> int:
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask proxies for their class
            with suppress(RuntimeError):  # sparse and fake tensors of other tests have no storage
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("name", registered.CASES)
def test_a_registered_client_costs_a_few_numbers(name: str) -> None:
    case = registered.CASES[name]
    few, many = (live_bytes(case, clients) for clients in (FEW, MANY))
    shown = 2 * 4 * case.population().k
    assert (many - few) / (MANY - FEW) <= MOST_BYTES + shown


def test_the_command_prints_a_table(capsys) -> None:
    registered.measure("logistic", clients=300, rounds=2)
    out = capsys.readouterr().out
    assert "300 registered" in out and "| 1 |" in out and "Seconds per round: median" in out
