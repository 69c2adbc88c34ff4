"""Engines: threads, chunks of clients, and what they leave as it was."""

import pytest
import torch
from torch import nn

from kit.networks import make_net
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import assert_same, run
from ppfl.algorithms import FedAvg, Sum
from ppfl.core import Population
from ppfl.data import Federation
from ppfl.sites import Stacked, engine_by_name, engines


class Broken(FedAvg):
    def work(self, *arguments):
        raise RuntimeError("no work today")


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_leave_the_network_and_the_number_of_cores_as_they_were_and_pass_errors_on(threads: int) -> None:
    before, engine, net = torch.get_num_threads(), Stacked(1, threads=threads), make_net()
    run(FedAvg(lr=0.1, batch_size=4), Population(net, k=1), make_federation(), engine=engine)
    assert_same(dict(net.named_parameters()), dict(make_net().named_parameters()), atol=0, rtol=0)
    with pytest.raises(RuntimeError, match="no work today"):
        run(Broken(lr=0.1), Population(make_net(), k=1), make_federation(), engine=engine)
    assert torch.get_num_threads() == before


def test_settings_of_engines_that_make_no_sense_are_refused() -> None:
    assert_refused(lambda: Stacked(chunk=0), SettingError, "chunk >= 1")
    assert_refused(lambda: Stacked(threads=0), SettingError, "threads >= 1")
    assert_refused(lambda: engine_by_name("fast"), SettingError, "'fast'", "'loop'", "'stacked'")


def test_a_tensor_that_leaves_a_client_in_two_places_is_counted_once() -> None:
    class Twice(FedAvg):
        def work(self, *arguments):
            work = super().work(*arguments)
            sums = work.upload.sums
            again = {f"{name} again": Sum(None, sum_.value) for name, sum_ in sums.items()}
            return work._replace(upload=work.upload._replace(sums=sums | again))

    population, federation = Population(make_net(), k=1), make_federation()
    once, twice = (run(method, population, federation, rounds=1) for method in (FedAvg(lr=0.1), Twice(lr=0.1)))
    assert once.reports[0].bytes_up == twice.reports[0].bytes_up > 0


@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_chunks_are_smaller_where_outputs_are_large(mix: str) -> None:
    sizes, vocabulary, k, seen = (300,) * 40, 20_000, 5, []
    x, clients = torch.ones(sum(sizes), 4), [f"c{i}" for i, size in enumerate(sizes) for _ in range(size)]
    federation = Federation.from_arrays(x, torch.arange(len(x)) % vocabulary, clients, test_fraction=0)
    samples, engine = federation.train, Stacked(threads=1)
    backend = engine.backend(Population(nn.Linear(4, vocabulary), k=k, mix=mix), x[:2], samples.y, vocabulary)
    engine.run(lambda chunks: seen.extend(map(len, chunks)), samples.sizes, 8, backend, samples)
    per_sample = 4 * vocabulary * (k if mix == "outputs" else 1)
    assert sum(seen) == len(sizes)
    assert max(seen) * 8 * per_sample <= engines.WORKING_SET
    assert mix == "weights" or max(seen) == 1 or max(seen) * 300 * per_sample <= engines.KEPT_OUTPUTS
