"""A small part of the campaign of kills: one of each kind."""

import signal
from random import Random

import kills
import pytest

ONE_PROCESS = [
    ("kill_run", signal.SIGKILL),
    ("kill_run", signal.SIGTERM),
    ("kill_run", signal.SIGINT),
    ("kill_resume", signal.SIGKILL),
    ("kill_report", signal.SIGTERM),
    ("kill_start", signal.SIGINT),
]
FAMILIES = [
    ("kill_comparison", signal.SIGKILL),
    ("kill_comparison", signal.SIGINT),
    ("kill_worker", signal.SIGKILL),
    ("kill_torchrun", signal.SIGKILL),
]


@pytest.mark.parametrize("trials", [ONE_PROCESS, FAMILIES], ids=["one process", "families"])
def test_killed_commands_go_on_with_nothing_lost_and_nobody_left(tmp_path, monkeypatch, trials):
    monkeypatch.setattr(kills, "ROUNDS", 40)
    with kills.ForkServer() as server:
        place = kills.Place(server, tmp_path, Random("kills"))
        for kind, stop in trials:
            trial = getattr(place, kind)(stop)
            assert trial.failure is None, f"{trial.attack}: {trial.failure}"


def test_every_kind_of_kill_is_part_of_the_campaign(tmp_path, monkeypatch):
    tried = []
    for name in vars(kills.Place):
        if name.startswith("kill_"):
            monkeypatch.setattr(kills.Place, name, lambda _place, _stop, name=name: tried.append(name))
    list(kills.attack(20, Random(0), tmp_path))
    assert set(tried) == {name for name in vars(kills.Place) if name.startswith("kill_")}
