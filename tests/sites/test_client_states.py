"""Client states at a site: an exchange can be undone, states are kept, saved and restored by client id.

Only clients that were ever written to are saved; the others are as every client begins."""

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
from lazy_population import lazy_population
from torch import nn

from kit.networks import make_linear
from kit.problems import make_federation
from kit.refusals import CheckpointError, DataError, WriteError, assert_refused
from kit.training import MAIN, name_keys
from ppfl.algorithms import FedAvg, Local, Rows, Sum, Upload, Work
from ppfl.core import Population
from ppfl.server import InProcess, begin, make_problem, train
from ppfl.sites import Close, Keep, Loop, Restore, Save, SavedStates, Setup, Site, Stacked, Train
from ppfl.sites import states as stores
from ppfl.sites.states import ClientStates

SIZES = (7, 12, 20, 5, 9, 4)
IDS = tuple(f"client-{at}" for at in range(len(SIZES)))
ENGINES = {"loop": Loop(), "chunks": Stacked(2), "threads": Stacked(1, threads=2)}
INTERRUPT = SimpleNamespace(lock=threading.Lock(), chunks=0, at=0)  # at which chunk of work the next comes; 0: none


class Arithmetic(Local):
    """A method whose work is plain arithmetic, so that a dict can follow it. Some work is interrupted."""

    def init_client(self, population):
        model = torch.tensor([-0.0, 0.0, 0.5], dtype=torch.float64)  # -0.0 is not 0.0
        return {"model": model, "count": torch.tensor(3), "seen": torch.tensor(False), "empty": torch.zeros(0)}

    def work(self, task, shared, own, state, data):
        new = {name: after(leaf, task) for name, leaf in state.items()}
        with INTERRUPT.lock:
            INTERRUPT.chunks += 1
            if INTERRUPT.chunks == INTERRUPT.at:
                raise KeyboardInterrupt
        change = torch.full((len(new["count"]), 2), 1.0 + task % 5)
        return Work(new, Upload({"change": Sum(None, change)}))


def after(leaf: torch.Tensor, task: int) -> torch.Tensor:
    return torch.ones_like(leaf) if leaf.dtype == torch.bool else (leaf % 1000) * 3 + task


State = dict[str, torch.Tensor]  # of one client
Everything = tuple[dict[str, State], dict]  # states of clients that were ever written to, and what filters remember


def bits(everything: Everything) -> tuple:
    """States bit for bit, in the order of the site's clients, and what filters remember."""
    states, filters = everything
    return [(i, n, v.numpy().tobytes()) for i in IDS if i in states for n, v in sorted(states[i].items())], filters


def as_rows(states: dict[str, State]) -> Rows:
    """In the order of the dict."""
    first = Arithmetic().init_client(None)
    stacked = {name: torch.stack([leaf, *(state[name] for state in states.values())]) for name, leaf in first.items()}
    return Rows(tuple(states), {name: leaf[1:].clone() for name, leaf in stacked.items()})


class States(RuleBasedStateMachine):
    """A site, asked anything in any order, against a dict of the states after each exchange of a round."""

    on_disk = False

    @initialize(engine=st.sampled_from(list(ENGINES)), block=st.sampled_from([64, 2**20]))
    def start(self, engine: str, block: int) -> None:
        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(stores, "_BLOCK", block))
        if Path("/dev/shm").is_dir():  # thousands of files, which a disk would take long for
            self.patches.enter_context(mock.patch.object(tempfile, "tempdir", "/dev/shm"))
        INTERRUPT.at = 0
        population, federation = Population(make_linear(), k=1), make_federation(SIZES)
        self.site = Site(federation, population, ENGINES[engine], states_on_disk=self.on_disk)
        self.method = Arithmetic(lr=0.1, batch_size=4)
        self.setup = Setup(MAIN, self.method, population.initial_network(), 1, float(sum(SIZES)), 0.0)
        self.site.answer(self.setup)
        stranger = Train(MAIN, 0, 1, 0, ("stranger",), 0, {}, {})
        assert_refused(lambda: self.site.answer(stranger), DataError, "'stranger'")
        self.first = self.method.init_client(None)
        self.now: Everything = ({}, {})
        self.kept = self.now
        self.exchange, self.round, self.undo = 0, -1, []  # undo: (exchange before, states before)
        self.saved = [(0, self.now)]  # the first states, and those after every exchange
        self.most, self.given = 3, []  # copies of all states at a time: now, kept, and while they are restored

    def teardown(self) -> None:
        if hasattr(self, "site"):
            with self.patches:
                assert bits(self.save(self.exchange, "kept")) == bits(self.kept)

    def save(self, merged: int, snapshot: str = "now") -> Everything:
        reply = self.site.answer(Save(MAIN, merged, snapshot))
        ids, values = reply.rows.ids, reply.rows.values
        names = IDS if ids is None else ids
        states = {client: {name: leaf[at] for name, leaf in values.items()} for at, client in enumerate(names)}
        assert list(states) == [client for client in IDS if client in states]
        return states, reply.by_site["site"]

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
        self.round, self.exchange = round, merged + 1
        states, filters = self.now
        worked = {
            client: {name: after(leaf, round) for name, leaf in states.get(client, self.first).items()}
            for client in who
        }
        INTERRUPT.chunks, INTERRUPT.at = 0, interrupt
        try:
            self.site.answer(request)
        except KeyboardInterrupt:
            assert INTERRUPT.chunks >= INTERRUPT.at  # and no thread goes on
            self.return_to(merged)  # which the invariant asks for
            return
        finally:
            INTERRUPT.at = 0
        _, remembered = self.save(self.exchange)
        assert bool(remembered) == bool(who or filters)
        self.now = states | worked, remembered  # read once, it must then come back with the states
        self.saved.append((self.exchange, self.now))

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
        which=st.integers(0, 9), order=st.permutations(IDS), elsewhere=st.booleans(), overwritten=st.booleans(),
        snapshot=st.sampled_from(["now", "kept"]),
    )  # fmt: skip
    def restore(self, which: int, order: list[str], elsewhere: bool, overwritten: bool, snapshot: str) -> None:
        """States that were saved, in any order and among those of clients of other sites."""
        exchange, (states, filters) = self.saved[-1 - which % len(self.saved)]
        given = {client: states[client] for client in order if client in states}
        rows = as_rows({"elsewhere": self.first, **given} if elsewhere else given)
        self.site.answer(Restore(MAIN, exchange, SavedStates(rows, {"site": filters, "elsewhere": {}}), snapshot))
        if overwritten:  # the site has a copy
            for leaf in rows.values.values():
                leaf.zero_()
        else:
            self.given.append((rows.values, {name: leaf.clone() for name, leaf in rows.values.items()}))
        if snapshot == "kept":
            self.kept = states, filters
        else:
            self.now, self.exchange, self.undo = (states, filters), exchange, []

    @precondition(lambda self: len(self.saved) > 6)
    @rule()
    def begin_again(self) -> None:
        """A closed session is unknown, and closing it twice does no harm."""
        for _ in range(2):
            self.site.answer(Close(MAIN))
        for request in (Save(MAIN, 0), Keep(MAIN), Train(MAIN, 0, 1, 0, IDS, 0, {}, {})):
            assert_refused(lambda request=request: self.site.answer(request), CheckpointError, "no session 'main'")
        self.site.answer(self.setup)
        self.now = self.kept = ({}, {})
        self.exchange, self.round, self.undo, self.most = 0, -1, [], 3

    @invariant()
    def the_site_has_what_the_dict_has(self) -> None:
        assert bits(self.save(self.exchange)) == bits(self.now)
        for given, copy in self.given:  # the site does not write to them
            assert all(leaf.equal(copy[name]) for name, leaf in given.items())
        on_disk = self.site.sessions[MAIN].states.bytes_on_disk
        per_client = 3 * 8 + 8 + 1
        assert on_disk <= 1.25 * (1 + self.most * len(IDS)) * per_client if self.on_disk else on_disk == 0


class StatesOnDisk(States):
    on_disk = True


TestStatesInMemory, TestStatesOnDisk = States.TestCase, StatesOnDisk.TestCase


class ShowsKeys(Local):
    """A method whose clients show who they are."""

    @property
    def shows(self):
        return ("key",)

    def work(self, task, shared, own, state, data):
        return Work(state, Upload(rows={"key": data.keys}))


def test_rows_belong_to_the_clients_that_a_request_names_in_any_order_and_once():
    federation, population = make_federation(SIZES), Population(make_linear(), k=1)
    site = Site(federation, population, Stacked())
    site.answer(Setup(MAIN, ShowsKeys(lr=0.1), population.initial_network(), 1, float(sum(SIZES))))

    def keys(*who: str) -> dict[str, int]:
        rows = site.answer(Train(MAIN, 0, 1, 0, who, 0, {}, {}, keep_states=False)).rows
        return dict(zip(rows.ids or federation.ids, rows.values["key"].tolist(), strict=True))

    expected = {client: int(key) for client, key in zip(IDS, name_keys(IDS), strict=True)}
    for who in (IDS, IDS[::-1], (*IDS[1:], IDS[0]), IDS[2:4]):
        assert keys(*who) == {client: expected[client] for client in who}
    assert_refused(lambda: keys(*IDS, IDS[2]), DataError, "'client-2' is named twice", "once")


def test_clients_of_a_method_without_states_are_restored_by_name_and_stay_unsaved():
    federation, population = make_federation(SIZES), Population(make_linear(), k=1)
    site = Site(federation, population, Stacked())
    site.answer(Setup(MAIN, FedAvg(lr=0.1), population.initial_network(), 1, float(sum(SIZES))))
    for ids in (IDS, IDS[2:4], None):
        site.answer(Restore(MAIN, 3, SavedStates(Rows(ids, {}))))
        assert site.answer(Save(MAIN, 3)).rows == Rows((), {})


def bytes_after(registered: int, rounds: int, on_disk: bool | None = True) -> list[int]:
    """That states take after each round, in which about 50 clients take part."""
    site = Site(lazy_population(registered), Population(nn.Linear(20, 2), k=1), Stacked(), states_on_disk=on_disk)
    method, transport = Local(lr=0.1, participation=50 / registered), InProcess(site)
    problem = make_problem(site.backend.population, transport, rounds=rounds)
    trained = train(method, problem, transport, begin(method, problem, transport))
    return [site.sessions[MAIN].states.bytes_on_disk for _ in trained]


ROW = 42 * 4  # bytes of a model


def test_the_disk_holds_those_who_took_part_and_the_space_of_earlier_rounds_is_used_again():
    for registered in (1000, 20_000):
        *_, last = bytes_after(registered, rounds=6)
        assert 50 * ROW <= last <= 1.25 * (1 + 6 * 50 + 50) * ROW  # a growing file has up to a quarter to spare
    # one that all clients begin with, everyone's, and those before the last round
    assert bytes_after(50, rounds=12) == [(1 + 50) * ROW, *[(1 + 2 * 50) * ROW] * 11]


def test_states_go_to_disk_where_they_would_take_more_than_the_limit(monkeypatch):
    for limit, on_disk in ((50 * 42 * 4, False), (50 * 42 * 4 - 1, True)):
        monkeypatch.setattr(stores, "MOST_BYTES", limit)
        assert (bytes_after(50, rounds=1, on_disk=None)[0] > 0) == on_disk


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is in memory")
def test_states_on_disk_stay_out_of_memory():
    """The system maps more than the rows at work, and would keep what is mapped in memory."""
    clients, chunk = 400, 50  # 8 MB of states
    states, before = ClientStates(torch.zeros(5000), clients, on_disk=True), kilobytes_of_files()
    for round in range(2):
        states.begin(round, round + 1, round, clients)
        for who in torch.arange(clients).split(chunk):
            states.write(who, states.rows(who) + who[:, None])
            assert kilobytes_of_files() - before < 100
    _, rows, _ = states.save()
    assert kilobytes_of_files() - before < 100
    assert rows[123].equal(torch.full((5000,), 2 * 123.0))


def kilobytes_of_files() -> int:
    """In memory, of files without a name."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(int(one.split("Rss:")[1].split()[0]) for one in maps if "(deleted)" in one)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_a_full_disk_is_an_error_that_says_what_to_do(monkeypatch) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert_refused(lambda: bytes_after(50, rounds=1), WriteError, "No space left", "set TMPDIR")
