"""The commands `up`, `server` and `site` in processes of their own, with TLS, on loopback. All that is started ends."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from filelock import FileLock

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")

from kit.refusals import SettingError, assert_refused
from kit.sites import SUMS_ALONE, FakeCarrier, assert_same_run, make_experiment, write_experiment
from ppfl.federation import server_run
from ppfl.federation.certificates import create_key_pair
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_link import control_client, register_only, wait_for
from ppfl.federation.flower_processes import LOOPBACK, LinkFiles, Processes, free_port, start_superlink, start_supernode
from ppfl.federation.private_files import write_secret
from ppfl.federation.provisioning import init_federation, registered_sites, revoke_site
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import load_site
from ppfl.runs import load_run, run

SITES = ("north", "south")
PPFL = [sys.executable, "-m", "ppfl", "federation"]
SHORT = {"watch": {"every": 9}}  # a message costs seconds, so scores are asked for at the end alone


@pytest.fixture
def alone(tmp_path, tmp_path_factory):
    """Federations of real processes take turns, as two at once are slow; and none of them leaves a process behind."""
    base = tmp_path_factory.getbasetemp()
    with FileLock((base.parent if base.name.startswith("popen-") else base) / "flower.lock"):
        yield
        wait_for(lambda: not any_process_of(tmp_path), "the end of all processes", seconds=20)


def any_process_of(folder) -> bool:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder) in file.read_text(errors="replace"):
                return True
    return False


def init(folder: Path, experiment) -> Path:
    """Folders of `ppfl federation init` on this machine, with a part of the data for each site."""
    out = folder / "clinics"
    init_federation(write_experiment(folder / "experiment.toml", experiment), SITES, LOOPBACK, out, port=free_port())
    for number, name in enumerate(SITES, 1):
        config = out / "sites" / name / "site.toml"
        part = f"\n[part]\nnumber = {number}\nof = {len(SITES)}\n\n[data]"
        config.write_text(config.read_text().replace("\n[data]", part, 1))
    return out


@pytest.mark.processes
def test_the_command_up_gives_the_trajectory_of_one_process(alone, tmp_path):
    experiment, out = make_experiment("ppfl-outputs", rounds=3, **SHORT), tmp_path / "out"
    file = write_experiment(tmp_path / "experiment.toml", experiment)
    command = [*PPFL, "up", file, "--sites", "2", "--at-least", "2", "--deadline", "300", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a round took" in done.stdout and str(out / "report.html") in done.stdout.replace("\n", "")
    (here,) = run(experiment, tmp_path / "alone")
    there = load_run(out / "seed-0")
    assert_same_run(here, there, experiment)
    assert all(record["seconds_sites"] > 0 and record["seconds_transport"] > 0 for record in there.metrics)


SERVER_THAT_IS_KILLED = """
import os, signal, sys
from pathlib import Path
from flwr.superlink.grid import http_grid
from ppfl.cli import main

metrics, push = Path(sys.argv[1]), http_grid.push_objects

def push_or_die(*arguments, **options):
    if metrics.is_file() and metrics.read_bytes().count(b"\\n") == 2:
        os.kill(os.getpid(), signal.SIGKILL)  # the messages of round 3 are announced, and not sent
    return push(*arguments, **options)

http_grid.push_objects = push_or_die
main(sys.argv[2:])
"""


@pytest.mark.processes
def test_server_and_sites_that_are_killed_and_started_again_change_nothing(alone, tmp_path):
    """The commands `server` and `site`. Messages of the killed server are never whole: SuperNodes wait for the rest
    until the next server ends its run."""
    experiment, runs = make_experiment("scaffold", rounds=6, **SHORT), tmp_path / "runs"
    out, metrics = init(tmp_path, experiment), tmp_path / "runs" / "seed-0" / "metrics.jsonl"
    address, authority = (out / "server" / "address.txt").read_text().strip(), out / "server" / "authority.pem"
    server = ["federation", "server", str(out / "server"), "--out", str(runs), "--host", LOOPBACK]
    server += ["--at-least", str(len(SITES)), "--deadline", "300"]
    configs = {name: out / "sites" / name / "site.toml" for name in SITES}
    (tmp_path / "stranger.key").write_bytes(create_key_pair().private_key)
    write_secret(tmp_path / "secret")

    with Processes(tmp_path / "logs") as processes:
        for name, config in configs.items():
            processes.start(name, [*PPFL, "site", config, "--end-with-parent"])
        script = [sys.executable, "-c", SERVER_THAT_IS_KILLED, metrics]
        killed = subprocess.run([*script, *server], capture_output=True, text=True, timeout=300)
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        assert metrics.read_bytes().count(b"\n") == 2
        processes.start("server", [*PPFL, *server[1:], "--resume"])
        wait_for(lambda: metrics.read_bytes().count(b"\n") >= 3, "round 3", seconds=300, pause=0.02)
        os.kill(processes.running["south"].pid, signal.SIGKILL)
        assert metrics.read_bytes().count(b"\n") < experiment.rounds, "the site is killed in the middle of the run"
        processes.running["south"].wait()
        processes.start("south", [*PPFL, "site", configs["south"], "--end-with-parent"])
        start_supernode(processes, address, authority, tmp_path / "stranger.key", tmp_path / "secret")
        assert processes.running["supernode"].wait(90) != 0, "a key that nobody registered is refused"
        assert processes.running["server"].wait(300) == 0, processes.last_lines("server")

    (here,) = run(experiment, tmp_path / "alone")
    there = load_run(runs / "seed-0")
    assert_same_run(here, there, experiment)
    assert not any(record.get("sites_lost") for record in there.metrics)

    revoke_site(out, "south")
    files = LinkFiles(*(out / "server" / name for name in ("server.pem", "server.key", "authority.pem", "secret")))
    with Processes(tmp_path / "logs") as processes:
        link = start_superlink(processes, files, out / "server" / "superlink.sqlite")
        assert wait_for(lambda: nodes(link), "the SuperLink") == {*SITES}  # from its database
        register_only(link, registered_sites(out / "server"))
        assert nodes(link) == {"north"}


def nodes(link) -> set[str]:
    """The sites that a SuperLink lets in."""
    from flwr.proto.control_pb2 import ListNodesRequest

    client = control_client(link)
    try:
        return {node.name for node in client.ListNodes(ListNodesRequest()).nodes_info if not node.unregistered_at}
    finally:
        client.close()


def test_a_server_folder_has_all_that_secure_sums_need(tmp_path, monkeypatch):
    """Without Flower: the sites are in this process, and the server reaches them with what its folder has."""
    experiment = make_experiment("fedavg", rounds=2, **SUMS_ALONE)
    out, services = init(tmp_path, experiment), {}
    for name in SITES:
        config = out / "sites" / name / "site.toml"
        config.write_text(config.read_text().replace("# secure_sums =", "secure_sums ="))
        services[name] = SiteService(load_site(config), config.parent)
    monkeypatch.setattr(server_run, "start_superlink", lambda *files: None)
    monkeypatch.setattr(server_run, "_register", lambda link, keys, processes: None)
    monkeypatch.setattr(server_run, "FlowerRun", nullcontext)
    monkeypatch.setattr(server_run, "FlowerCarrier", lambda grid, keys: FakeCarrier(services))
    (there,) = server_run.run_server(out / "server", tmp_path / "runs", secure=True)
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    assert "int64" in services["north"].ledger.file.read_text()  # masked sums


def test_what_cannot_work_is_said_before_anyone_waits(tmp_path):
    def run_server(folder, **options):
        return lambda: server_run.run_server(folder, tmp_path / "runs", **options)

    assert_refused(run_server(tmp_path), FederationError, "server.pem")
    server = init(tmp_path, make_experiment("fedavg")) / "server"
    assert_refused(run_server(server, secure=True), SettingError, "report_clients = false")
    write_experiment(server / "experiment.toml", make_experiment("ppfl-outputs", **SUMS_ALONE))
    assert_refused(run_server(server, secure=True), SettingError, "share_memberships = false")
    shutil.rmtree(server / "sites")
    assert_refused(run_server(server), FederationError, "no key of a site")
