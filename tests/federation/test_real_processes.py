"""Three sites in processes of their own, with TLS and authentication, on loopback. Everything that is started ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")
pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from federation.test_federated_run import assert_same_run, make_experiment
from kit.counting_proxy import CountingProxy
from ppfl.federation import local_federation as federation_module
from ppfl.federation.certificates import create_key_pair
from ppfl.federation.federated_run import run_federated
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_carrier import FlowerCarrier
from ppfl.federation.flower_link import FlowerRun
from ppfl.federation.flower_processes import Processes, start_supernode
from ppfl.federation.local_federation import WatchedCarrier, local_federation
from ppfl.federation.private_files import write_secret
from ppfl.federation.site_mail import Patience
from ppfl.runs import run

PATIENCE = Patience(deadline=300, resend=30, at_least=3)
LEDGER = "seed-0.federation/ledger.jsonl"
SHORT = {"watch": {"every": 5}}  # a message costs seconds, so scores are asked for at the end alone


@pytest.fixture(scope="module")
def proxy():
    """Between the sites and the SuperLink."""
    write_sites = federation_module._write_sites

    def write_sites_behind_it(folder, link, *others):
        proxy.target = link.address
        return write_sites(folder, link._replace(address=proxy.address), *others)

    with CountingProxy() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation_module, "_write_sites", write_sites_behind_it)
        yield proxy


@pytest.fixture(scope="module")
def running(tmp_path_factory, our_turn, proxy):
    folder = tmp_path_factory.mktemp("federation")
    with local_federation(folder, make_experiment("fedavg"), folder, 3) as federation:
        yield federation
        started = [process.pid for process in federation.processes.running.values()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def run_over_flower(experiment, out, federation, **options):
    try:
        with FlowerRun(federation.link) as grid:
            carrier = FlowerCarrier(grid, federation.public_keys)
            if federation.processes is not None:
                carrier = WatchedCarrier(carrier, federation.processes)
            return run_federated(experiment, out, carrier, sites=federation.sites, patience=PATIENCE, **options)
    except FederationError as error:
        error.add_note(federation.last_lines())
        raise


def test_three_processes_give_the_trajectory_of_one(running, proxy, tmp_path):
    experiment, before = make_experiment("ppfl-outputs", **SHORT), proxy.bytes
    (there,) = run_over_flower(experiment, tmp_path / "federated", running)
    carried = [json.loads(line)["bytes"] for line in (tmp_path / "federated" / LEDGER).read_text().splitlines()]
    payload, wire = sum(carried), proxy.bytes - before
    print(f"{len(carried)} messages, payload {payload:,} bytes, on the wire {wire:,} bytes")  # with pytest -s
    assert payload < wire < 1.1 * payload + 20_000 * len(carried)
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    for record in there.metrics:
        assert 0 < record["seconds_sites"] < record["seconds_sites"] + record["seconds_transport"]


def test_a_site_that_is_killed_in_a_round_and_started_again_changes_nothing(running, tmp_path):
    experiment = make_experiment("ditto", **SHORT)

    def kill(seed, end):
        if end.state.round == 2:
            victim = running.processes.running["site-2"]
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait()
            running.start_site("site-2")

    (there,) = run_over_flower(experiment, tmp_path / "federated", running, on_round_end=kill)
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    assert not any(record.get("sites_lost") for record in there.metrics)


SERVER = """
import os, signal, sys
from pathlib import Path
from flwr.superlink.grid import http_grid
from federation.test_real_processes import make_experiment, run_over_flower, SHORT
from ppfl.federation.flower_client import SuperLinkAddress
from ppfl.federation.local_federation import LocalFederation

def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def after_round(seed, end):
    if end.state.round == 2:
        http_grid.push_objects = die  # the messages of the next round are announced, and not sent

folder, address, out = sys.argv[1:]
server = Path(folder) / "server"
link = SuperLinkAddress(address, (server / "authority.pem").read_bytes(), (server / "secret").read_bytes())
federation = LocalFederation(Path(folder), link, ("site-1", "site-2", "site-3"), None)
run_over_flower(make_experiment("scaffold", **SHORT), Path(out), federation, on_round_end=after_round)
"""


def test_a_server_that_is_killed_while_it_sends_resumes_with_the_same_result(running, tmp_path):
    """Its messages are never whole, and the SuperNodes wait for the rest until the next server ends its run."""
    experiment, out = make_experiment("scaffold", **SHORT), tmp_path / "federated"
    command = [sys.executable, "-c", SERVER, str(running.folder), running.link.address, str(out)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert (out / "seed-0" / "metrics.jsonl").read_bytes().count(b"\n") == 2
    (there,) = run_over_flower(experiment, out, running, resume=True)
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)


def test_a_key_that_nobody_registered_is_refused(running, tmp_path):
    (tmp_path / "key").write_bytes(create_key_pair().private_key)
    write_secret(tmp_path / "secret")
    with Processes(tmp_path / "logs") as processes:
        authority = running.folder / "server" / "authority.pem"
        start_supernode(processes, running.link.address, authority, tmp_path / "key", tmp_path / "secret")
        supernode = processes.running["supernode"]
        assert supernode.wait(90) != 0
        assert "Received" not in (tmp_path / "logs" / "supernode.log").read_text()
