"""Client states on disk: the tables in memory are the oracle, and space and memory follow the clients at work."""

import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kit.problems import make_federation, make_net
from kit.training import assert_same, connect, run
from ppfl.algorithms import FedPer, Local
from ppfl.core.errors import WriteError
from ppfl.core.population import Population
from ppfl.core.trees import tree_map
from ppfl.data import lazy_population
from ppfl.server import InProcess, begin, make_problem, train
from ppfl.server.loop import MAIN
from ppfl.sites import Site, Stacked, mapped_states
from ppfl.sites import site as sites
from ppfl.sites.mapped_states import MappedMemory, MappedTable
from ppfl.sites.state_tables import InMemoryTable

CLIENTS = 9
ROW_BYTES = 3 * 2 * 4 + 8 + 1  # of the states below


def first_states(who: torch.Tensor):
    """Every client begins elsewhere; leaves of several types, one of them without numbers."""
    models = torch.arange(6.0).reshape(3, 2) + who.reshape(-1, 1, 1)
    return {"model": models, "count": who.clone(), "seen": who < 0, "empty": torch.zeros(len(who), 0)}


def states_after(who: torch.Tensor, step: int):
    changed = tree_map(lambda leaf: (leaf * 3 + step).to(leaf.dtype), first_states(who))
    return {**changed, "seen": torch.ones(len(who), dtype=torch.bool)}


clients = st.lists(st.integers(0, CLIENTS - 1), min_size=1, unique=True).map(torch.tensor)
writes = st.tuples(st.just("write"), clients)
steps = st.lists(writes | st.sampled_from([("undo", None), ("forget", None), ("copy", None), ("back", None)]))


@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_any_sequence_of_writes_undos_and_copies_gives_what_tables_in_memory_give(steps) -> None:
    tables = [MappedTable(first_states, CLIENTS), InMemoryTable(first_states(torch.arange(CLIENTS))).copy()]
    kept, changes, everyone = None, [], torch.arange(CLIENTS)
    for number, (step, who) in enumerate(steps):
        if step == "write":
            changes.append([table.change(who, table.rows(who)) for table in tables])
            for table, change in zip(tables, changes[-1], strict=True):
                table.write(change, states_after(who, number))
        elif step == "undo" and changes:
            for table, change in zip(tables, changes.pop(), strict=True):
                table.undo(change)
        elif step == "forget":
            for pair in changes:
                for table, change in zip(tables, pair, strict=True):
                    table.forget(change)
            changes = []
        elif step == "copy":
            if kept is not None:
                kept[0].release()
            kept, tables = tables, [table.copy() for table in tables]
        elif step == "back" and kept is not None and not changes:
            tables[0].release()
            tables = [table.copy() for table in kept]
        for mapped, expected in [tables, *([] if kept is None else [kept])]:
            assert_same(mapped.rows(everyone), expected.rows(everyone), atol=0, rtol=0)
            assert_same(mapped.named(), expected.named(), atol=0, rtol=0)
    written = tables[0].rows(everyone)["seen"]
    in_use = int((tables[0]._records._uses > 0).sum())
    least = int(written.sum())
    assert least <= in_use <= (1 + (kept is not None)) * CLIENTS + sum(len(one[0].who) for one in changes)


def test_states_restored_from_names_take_space_for_those_that_differ_from_the_first() -> None:
    table = MappedTable(first_states, CLIENTS)
    who = torch.tensor([7, 2])
    table.write(table.change(who, None), states_after(who, 5))
    zero = torch.tensor([0])
    table.write(table.change(zero, None), first_states(zero) | {"model": torch.tensor([[[-0.0, 1], [2, 3], [4, 5]]])})
    again = MappedTable(first_states, CLIENTS).restored(table.named())
    assert_same(again.named(), table.named(), atol=0, rtol=0)
    assert bool(again.rows(zero)["model"][0, 0, 0].signbit())  # -0.0 is not 0.0
    assert int((again._records._uses > 0).sum()) == 3


def test_restored_states_do_not_change_with_what_they_were_restored_from() -> None:
    everyone = torch.arange(CLIENTS)
    for table in (MappedTable(first_states, CLIENTS), InMemoryTable(first_states(everyone))):
        saved = states_after(everyone, 5)
        again = table.restored(saved)
        for leaf in saved.values():
            leaf.zero_()
        assert_same(again.rows(everyone), states_after(everyone, 5), atol=0, rtol=0)


def test_a_file_is_filled_from_its_beginning_and_its_slots_are_used_again() -> None:
    table = MappedTable(first_states, 1000)
    assert table.bytes_on_disk == 0
    who = torch.arange(100)
    for step in range(20):
        change = table.change(who, None)
        table.write(change, states_after(who, step))
        table.forget(change)
        assert table.bytes_on_disk == min(step + 1, 2) * 100 * ROW_BYTES  # their states, and those of one round before


def test_the_disk_holds_those_who_took_part_and_not_all_who_are_registered() -> None:
    sizes = []
    for registered in (1000, 20_000):
        site = Site(lazy_population(registered), Population(nn.Linear(20, 2), k=1), Stacked(), states_on_disk=True)
        method, transport = Local(lr=0.1, participation=50 / registered), InProcess(site)
        problem = make_problem(site.backend.population, transport, rounds=6)
        for _ in train(method, problem, transport, begin(method, problem, transport)):
            pass
        sizes.append(site.sessions[MAIN].states._now.states.bytes_on_disk)
    assert max(sizes) <= 1.25 * (6 * 50 + 50) * 42 * 4  # a growing file has up to a quarter to spare


def test_states_go_to_disk_where_they_would_take_more_than_the_limit(monkeypatch) -> None:
    federation, bytes_of_all = make_federation((5,) * 8), 8 * sum(p.numel() * 4 for p in make_net().parameters())
    for limit, on_disk in ((bytes_of_all, False), (bytes_of_all - 1, True)):
        monkeypatch.setattr(sites, "MOST_BYTES", limit)
        found = run(Local(lr=0.3), Population(make_net(), k=1), federation, rounds=1)
        table = found.transport.sites[0].sessions[MAIN].states._now.states
        assert isinstance(table, MappedTable) == on_disk


def test_what_is_mapped_is_given_back_and_nothing_is_lost(monkeypatch) -> None:
    trims = []
    real = MappedMemory.trim
    monkeypatch.setattr(MappedMemory, "trim", lambda self: (trims.append(1), real(self))[1])
    federation = make_federation((5, 9, 4), dtype=torch.float64)
    method = FedPer(lr=0.3, batch_size=4)
    found, expected = (
        run(method, Population(make_net(dtype=torch.float64), k=1), federation, on_disk=on_disk)
        for on_disk in (True, False)
    )
    assert_same(found.everything(), expected.everything(), atol=0, rtol=0)
    assert trims


@pytest.mark.parametrize("gap", [0, 100, 2**20])
@pytest.mark.parametrize("block", [64, 2**20])
@pytest.mark.parametrize("width", [1, 40])
def test_records_are_read_as_they_were_written_whatever_is_read_together(width, block, gap, monkeypatch) -> None:
    monkeypatch.setattr(mapped_states, "_GAP", gap)
    monkeypatch.setattr(mapped_states, "_BLOCK", block)
    records, drawn = mapped_states._Records([((width,), torch.int32), ((), torch.uint8)], None), torch.Generator()
    held: dict[int, list] = {}
    for count in (1, 30, 7):
        leaves = [torch.randint(1000, (count, width), generator=drawn, dtype=torch.int32), torch.arange(count).byte()]
        slots = records.add(leaves, count)
        held |= {slot: [leaf[i] for leaf in leaves] for i, slot in enumerate(slots.tolist())}
        records.drop(slots[::3])  # others take these places
        held = {slot: row for slot, row in held.items() if slot not in slots[::3].tolist()}
    asked = [*held][::-1] + [*held][:2]  # in any order, and again
    for found, expected in zip(records.read(torch.tensor(asked)), zip(*map(held.get, asked), strict=True), strict=True):
        assert found.equal(torch.stack(expected))


def test_states_are_read_and_written_without_mapping_their_file(monkeypatch) -> None:
    monkeypatch.setattr(mapped_states.mmap, "mmap", None)  # the system would map much more than the rows at work
    table, who = MappedTable(first_states, 1000), torch.arange(0, 1000, 7)
    table.write(table.change(who, None), states_after(who, 5))
    assert_same(table.rows(who.flip(0)), states_after(who.flip(0), 5), atol=0, rtol=0)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space")
def test_a_full_disk_is_an_error_that_says_what_to_do(monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    transport = connect(make_federation(), Population(make_net(), k=1), on_disk=True)
    problem = make_problem(transport.sites[0].backend.population, transport, rounds=1)
    state = begin(Local(lr=0.1), problem, transport)
    with pytest.raises(WriteError, match=r"client states need .* bytes in .*No space left.*set TMPDIR"):
        next(train(Local(lr=0.1), problem, transport, state))
