"""Client states at a site: an exchange can be undone, states are kept, saved and restored by client id."""

import errno
import os
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from kit.networks import make_linear
from kit.problems import make_federation
from kit.refusals import CheckpointError, DataError, WriteError, assert_refused
from kit.training import MAIN
from ppfl.algorithms import Local, Rows, Sum, Upload, Work
from ppfl.core import Population
from ppfl.data import lazy_population
from ppfl.server import InProcess, begin, make_problem, train
from ppfl.sites import Close, Keep, Loop, Restore, Save, Setup, Site, Stacked, Train, mapped_states
from ppfl.sites import site as sites

SIZES = (7, 12, 20, 5, 9, 4)
IDS = tuple(f"client-{at}" for at in range(len(SIZES)))
ENGINES = {"loop": Loop(), "chunks": Stacked(2), "threads": Stacked(1, threads=2)}
INTERRUPT = SimpleNamespace(lock=threading.Lock(), chunks=0, at=0)  # at which chunk of work the next comes; 0: none


class Arithmetic(Local):
    """A method whose work is plain arithmetic, so that a dict can follow it. Some work is interrupted."""

    def init_clients(self, population, seed, ids):
        number = torch.tensor([int(client.split("-")[1]) for client in ids])
        model = torch.stack([number, -number, 0 * number], 1).double() * -0.5  # -0.0 is not 0.0
        return {"model": model, "count": number, "seen": number < 0, "empty": torch.zeros(len(ids), 0)}

    def work(self, backend, task, shared, own, client, data):
        new = {name: after(leaf, task) for name, leaf in client.items()}
        with INTERRUPT.lock:
            INTERRUPT.chunks += 1
            if INTERRUPT.chunks == INTERRUPT.at:
                raise KeyboardInterrupt
        change = torch.full((len(new["count"]), 2), 1.0 + task % 5)
        return Work(new, Upload({"change": Sum(None, change)}))


def after(leaf: torch.Tensor, task: int) -> torch.Tensor:
    return torch.ones_like(leaf) if leaf.dtype == torch.bool else (leaf % 1000) * 3 + task


def bits(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """What is saved of the clients, bit for bit."""
    return {name: leaf.numpy().tobytes() for name, leaf in values.items()}


class States(RuleBasedStateMachine):
    """A site, asked anything in any order, against a dict of every client's state after each exchange of a round."""

    on_disk = False

    @initialize(
        engine=st.sampled_from(list(ENGINES)), gap=st.sampled_from([0, 60, 2**20]), block=st.sampled_from([64, 2**20])
    )
    def start(self, engine: str, gap: int, block: int) -> None:
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.multiple(mapped_states, _GAP=gap, _BLOCK=block))
        if Path("/dev/shm").is_dir():  # thousands of files, which a disk would take long for
            self.patches.enter_context(mock.patch.object(tempfile, "tempdir", "/dev/shm"))
        INTERRUPT.at = 0
        population, federation = Population(make_linear(), k=1), make_federation(SIZES)
        self.site = Site(federation, population, ENGINES[engine], states_on_disk=self.on_disk)
        self.method = Arithmetic(lr=0.1, batch_size=4)
        self.setup = Setup(MAIN, self.method, population.initial_network(), 1, float(sum(SIZES)), 0.0)
        self.site.answer(self.setup)
        stranger = Train(MAIN, 0, 1, 0, ("stranger",), 0, {}, {})
        assert_refused(lambda: self.site.answer(stranger), DataError, "'site'", "'stranger'")
        first = self.method.init_clients(None, 1, IDS)
        norms = {"filter.norms": torch.zeros(len(IDS), 2).double(), "filter.kinds": torch.zeros(len(IDS)).long()}
        self.now = self.kept = first | norms
        self.exchange, self.round, self.undo = 0, -1, []  # undo: (exchange before, states before)
        self.saved = [(0, self.now)]  # the first states, and those after every exchange
        self.most, self.given = 3, []  # copies of all states at a time: now, kept, and while they are restored

    def teardown(self) -> None:
        if hasattr(self, "site"):
            with self.patches:
                assert bits(self.save(self.exchange, "kept")) == bits(self.kept)

    def save(self, merged: int, snapshot: str = "now") -> dict[str, torch.Tensor]:
        return self.site.answer(Save(MAIN, merged, snapshot)).rows.values

    def can_return(self, merged: int) -> bool:
        return merged >= (self.undo[0][0] if self.undo else self.exchange)

    def return_to(self, merged: int) -> None:
        while merged < self.exchange:
            self.exchange, self.now = self.undo.pop()

    @rule(
        who=st.lists(st.sampled_from(IDS), unique=True), behind=st.integers(0, 3), another_round=st.booleans(),
        interrupt=st.sampled_from([0, 0, 0, 1, 2]), keeps=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def train(self, who: list[str], behind: int, another_round: bool, interrupt: int, keeps: bool) -> None:
        """Some clients work. The server may not have merged the last replies, or may ask for a measurement alone."""
        merged = max(0, self.exchange - behind) if keeps else self.exchange
        round = self.round + 1 if another_round else max(0, self.round)
        request = Train(MAIN, round, merged + 1, merged, tuple(who), round, {}, {}, keeps)
        if not self.can_return(merged):
            assert_refused(lambda: self.site.answer(request), CheckpointError, "restore the states")
            return
        if not keeps:
            self.site.answer(request)
            return
        self.return_to(merged)
        self.undo = [*(self.undo if round == self.round else ()), (self.exchange, self.now)]
        self.most = max(self.most, 3 + len(self.undo))
        self.round, self.exchange, at = round, merged + 1, [IDS.index(client) for client in who]
        new = {name: leaf.clone() for name, leaf in self.now.items()}
        for name in ("model", "count", "seen", "empty"):
            new[name][at] = after(new[name][at], round)
        INTERRUPT.chunks, INTERRUPT.at = 0, interrupt
        try:
            self.site.answer(request)
        except KeyboardInterrupt:
            assert INTERRUPT.chunks >= INTERRUPT.at  # and no thread goes on
            self.return_to(merged)  # which the invariant asks for
            return
        finally:
            INTERRUPT.at = 0
        found = self.save(self.exchange)
        norms = {name: leaf.clone() for name, leaf in found.items() if name.startswith("filter")}
        self.now = new | norms  # read once, they must then come back with the states
        self.saved.append((self.exchange, self.now))
        assert bool(found["filter.kinds"][at].all())

    @rule(who=st.lists(st.sampled_from(IDS), min_size=1, unique=True), another_round=st.booleans())
    def train_as_usual(self, who: list[str], another_round: bool) -> None:
        self.train(who, behind=0, another_round=another_round, interrupt=0, keeps=True)

    @rule(behind=st.integers(0, 3), snapshot=st.sampled_from(["now", "kept"]))
    def save_earlier(self, behind: int, snapshot: str) -> None:
        """The states of the last merged exchange, which may be an earlier one."""
        merged = max(0, self.exchange - behind)
        if not self.can_return(merged):
            assert_refused(lambda: self.save(merged, snapshot), CheckpointError, f"after exchange {merged}; restore")
            return
        self.return_to(merged)
        assert bits(self.save(merged, snapshot)) == bits(self.kept if snapshot == "kept" else self.now)

    @rule()
    def keep(self) -> None:
        self.site.answer(Keep(MAIN))
        self.kept = self.now

    @rule(
        which=st.integers(0, 9), order=st.permutations(range(len(IDS))), named=st.booleans(),
        overwritten=st.booleans(), snapshot=st.sampled_from(["now", "kept"]),
    )  # fmt: skip
    def restore(self, which: int, order: list[int], named: bool, overwritten: bool, snapshot: str) -> None:
        """States that were saved, in any order and among those of clients of other sites."""
        exchange, states = self.saved[-1 - which % len(self.saved)]
        given = {name: leaf.clone() for name, leaf in states.items()}
        rows = Rows(None, given)
        if named:
            given = {name: torch.cat([leaf[order], leaf[:1]]) for name, leaf in given.items()}
            rows = Rows((*(IDS[at] for at in order), "elsewhere"), given)
        self.site.answer(Restore(MAIN, exchange, rows, snapshot))
        if overwritten:  # the site has a copy
            for leaf in given.values():
                leaf.zero_()
        else:
            self.given.append((given, {name: leaf.clone() for name, leaf in given.items()}))
        if snapshot == "kept":
            self.kept = states
        else:
            self.now, self.exchange, self.undo = states, exchange, []

    @precondition(lambda self: len(self.saved) > 6)
    @rule()
    def begin_again(self) -> None:
        """States of too few clients are refused. A closed session is unknown, and closing it twice does no harm."""
        lacking = Rows(IDS[:2], {name: leaf[:2] for name, leaf in self.now.items()})
        assert_refused(lambda: self.site.answer(Restore(MAIN, 0, lacking)), CheckpointError, "'client-2'", "'site'")
        for _ in range(2):
            self.site.answer(Close(MAIN))
        for request in (Save(MAIN, 0), Keep(MAIN), Train(MAIN, 0, 1, 0, IDS, 0, {}, {})):
            assert_refused(lambda request=request: self.site.answer(request), CheckpointError, "no session 'main'")
        self.site.answer(self.setup)
        _, self.now = self.saved[0]
        self.kept, self.exchange, self.round, self.undo, self.most = self.now, 0, -1, [], 3

    @invariant()
    def the_site_has_what_the_dict_has(self) -> None:
        assert bits(self.save(self.exchange)) == bits(self.now)
        assert all(bits(given) == bits(copy) for given, copy in self.given)  # the site does not write to them
        on_disk = self.site.sessions[MAIN].states.bytes_on_disk
        per_client = 3 * 8 + 8 + 1 + 16 + 8  # bytes of a state, and of its norms
        assert on_disk <= 1.25 * self.most * len(IDS) * per_client if self.on_disk else on_disk == 0


class StatesOnDisk(States):
    on_disk = True


TestStatesInMemory, TestStatesOnDisk = States.TestCase, StatesOnDisk.TestCase


def bytes_after(registered: int, rounds: int, on_disk: bool | None = True) -> list[int]:
    """That states take after each round, in which about 50 clients take part."""
    site = Site(lazy_population(registered), Population(nn.Linear(20, 2), k=1), Stacked(), states_on_disk=on_disk)
    method, transport = Local(lr=0.1, participation=50 / registered), InProcess(site)
    problem = make_problem(site.backend.population, transport, rounds=rounds)
    trained = train(method, problem, transport, begin(method, problem, transport))
    return [site.sessions[MAIN].states.bytes_on_disk for _ in trained]


ROW = 42 * 4 + 24  # bytes of a model, and of its norms


def test_the_disk_holds_those_who_took_part_and_the_space_of_earlier_rounds_is_used_again():
    for registered in (1000, 20_000):
        *_, last = bytes_after(registered, rounds=6)
        assert 50 * ROW <= last <= 1.25 * (6 * 50 + 50) * ROW  # a growing file has up to a quarter to spare
    used = bytes_after(50, rounds=12)
    assert used[0] == 50 * ROW and used[1:] == [2 * 50 * ROW] * 11  # states, and those of one round before


def test_states_go_to_disk_where_they_would_take_more_than_the_limit(monkeypatch):
    for limit, on_disk in ((50 * 42 * 4, False), (50 * 42 * 4 - 1, True)):
        monkeypatch.setattr(sites, "MOST_BYTES", limit)
        assert (bytes_after(50, rounds=1, on_disk=None)[0] > 0) == on_disk


def test_training_maps_no_file_of_states(monkeypatch):
    """The system would map much more than the rows at work, and keep what is mapped in memory."""
    monkeypatch.setattr(mapped_states.mmap, "mmap", None)
    bytes_after(50, rounds=2)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_a_full_disk_is_an_error_that_says_what_to_do(monkeypatch) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_refused(lambda: bytes_after(50, rounds=1), WriteError, "No space left", "set TMPDIR")
