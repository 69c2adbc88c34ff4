"""Three sites by Flower's own commands on loopback, with TLS and keys of nodes: the run of one process, also after
kills. And the app itself: public names alone, and a relay that answers whatever goes wrong."""

import ast
import os
import re
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

import ppfl
from kit.experiments import call_ppfl
from kit.refusals import assert_refused
from kit.sites import assert_same_run, make_experiment, make_services, write_experiment, write_toml
from ppfl.federation.exchange import Timeouts
from ppfl.federation.flower_app import GridChannel, run_app, write_app
from ppfl.federation.messages import Call, FederationError, Join, Packed, pack, unpack_answer
from ppfl.federation.policy import experiment_hash, over_sites
from ppfl.federation.service import serve
from ppfl.federation.trial import SUPERLINK, run_trial, start_site, start_supernode, trial
from ppfl.runs import load_run, run

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
SOURCES = Path(ppfl.__file__).parent


def test_nothing_but_public_names_of_flower_is_used():
    found = {}
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {(str(file.relative_to(SOURCES)), name): None for name in modules if name.startswith("flwr")}
    assert {name for _, name in found} <= PUBLIC
    assert {file for file, _ in found} == {
        "federation/flower_app.py", "federation/app/relay.py", "federation/app/server.py",
    }  # fmt: skip


def test_the_app_has_all_keys_of_its_run_config(tmp_path):
    write_app(tmp_path)
    text = (tmp_path / "pyproject.toml").read_text()
    source = (SOURCES / "federation" / "flower_app.py").read_text()
    used = set(re.findall(r'asked\["([a-z-]+)"\]', source))
    assert used
    assert all(re.search(rf"^{key} = ", text, re.MULTILINE) for key in used)
    assert {file.name for file in (tmp_path / "ppfl_app").iterdir()} == {"__init__.py", "relay.py", "server.py"}


# ---------------------------------------------------------------------- the relay and the socket


def relayed(packed, path):
    """What the relay makes of a message, as bytes."""
    from ppfl.federation.app.relay import relay

    parts = {name: SimpleNamespace(data=getattr(packed, name)) for name in ("shared", "own")}
    message = SimpleNamespace(content={"ppfl": parts})
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppfl.federation.app.relay.Message", lambda content, reply_to: made.append(content))
        relay(message, SimpleNamespace(node_config={"ppfl-socket": str(path)}))
    return made[0]["ppfl"]["answer"].data


def test_the_relay_carries_bytes_to_the_site_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = make_experiment("fedavg")
    service = make_services(tmp_path, ("a",), experiment)["a"]
    ended = threading.Event()
    thread = threading.Thread(target=serve, args=(service,), kwargs={"stop": ended.is_set}, daemon=True)
    thread.start()
    socket = service.base / "ppfl.sock"
    while not socket.exists():
        thread.join(0.01)
    assert socket.stat().st_mode & 0o077 == 0
    packed = pack(Call("run", "a", 1, 1, [Join(experiment_hash(experiment), 0)]))
    assert unpack_answer(relayed(packed, socket.relative_to(tmp_path))).replies
    for last in (False, True):  # a relay that is killed before it has sent anything
        if last:
            ended.set()
        with suppress(OSError), Client(str(socket.relative_to(tmp_path)), "AF_UNIX"):
            pass
        if not last:
            assert unpack_answer(relayed(packed, socket.relative_to(tmp_path))).replies
    thread.join(10)
    assert not thread.is_alive()


def test_a_relay_without_a_site_answers_nothing_instead_of_an_error(tmp_path):
    assert relayed(Packed(b"", b""), tmp_path / "no.sock") == b""


class FakeGrid:
    """Nodes as Flower has them."""

    def __init__(self, *nodes):
        self.nodes = [SimpleNamespace(name=name, node_id=at, public_key=key, last_activated_at="t")
                      for at, (name, key) in enumerate(nodes)]  # fmt: skip

    def get_nodes(self):
        return self.nodes


def test_a_site_is_known_by_its_key_and_not_by_its_name(tmp_path):
    file = tmp_path / "nodes.json"
    assert GridChannel(FakeGrid(("a", b"1"), ("b", b"2")), file, 60).online() == {"a": "t", "b": "t"}
    # a second key under a name, alone or beside the first one, is not taken for the site
    assert GridChannel(FakeGrid(("a", b"3"), ("b", b"2")), file, 60).online() == {"b": "t"}
    assert GridChannel(FakeGrid(("a", b"1"), ("a", b"3")), file, 60).online() == {"a": "t"}
    assert GridChannel(FakeGrid(("c", b"1"), ("c", b"3")), tmp_path / "others.json", 60).online() == {}


# ---------------------------------------------------------------------- real processes


@pytest.fixture
def alone(tmp_path, tmp_path_factory):
    """Federations of real processes take turns, as two at once are slow; and none of them leaves a process behind."""
    base = tmp_path_factory.getbasetemp()
    with FileLock((base.parent if base.name.startswith("popen-") else base) / "flower.lock"):
        yield
    end = time.monotonic() + 30  # Flower's own children end a little later
    while left := [file for file in Path("/proc").glob("[0-9]*/cmdline") if is_of(file, tmp_path)]:
        assert time.monotonic() < end, left
        time.sleep(0.5)


def is_of(file, folder):
    with suppress(OSError):
        return str(folder) in file.read_text(errors="replace")
    return False


@pytest.mark.processes
@pytest.mark.slow
def test_up_is_the_run_of_one_process(tmp_path, alone, capsys):
    experiment = make_experiment("fedavg", rounds=3)
    file = write_experiment(tmp_path / "digits.toml", experiment)
    shown = call_ppfl(capsys, "federation", "up", file, "--sites", 3, "--out", tmp_path / "out")
    assert shown.code == 0, shown
    assert "3 of 3 sites are online" in shown.out
    assert_same_run(run(experiment, tmp_path / "here")[0], load_run(tmp_path / "out" / "seed-0"), experiment)
    status = call_ppfl(capsys, "federation", "status", tmp_path / "out")
    assert "finished" in status.out
    wrong = [path for path in (tmp_path / "out").rglob("*") if path.stat().st_mode & 0o077 and not path.is_symlink()]
    assert not wrong
    other = make_experiment("fedavg", rounds=4)
    file = write_experiment(tmp_path / "digits.toml", other)
    refused = call_ppfl(capsys, "federation", "up", file, "--sites", 3, "--out", tmp_path / "out")
    assert refused.code == 2
    assert "another experiment" in refused.err
    assert "starting" not in refused.out


@pytest.mark.processes
@pytest.mark.slow
def test_kills_of_site_supernode_and_server_leave_the_same_run(tmp_path, alone):
    """The app of the server ends by a signal, then a site, then a SuperNode; Flower and the app start them again."""
    experiment = make_experiment("ditto", rounds=8)
    here = run(experiment, tmp_path / "here")[0]
    with trial(tmp_path / "trial", experiment, tmp_path, 3, lambda line: None) as running:
        killed, timers = [], []

        def kill_after(line):
            if "round 2:" in line and "app" not in killed:
                killed.append("app")
                kill_server_app(tmp_path)
            elif "round 4:" in line and "site" not in killed:
                killed.append("site")
                kill(running, "site-2")
                start_site(running, "site-2", running.sites["site-2"])
            elif "round 5:" in line and "node" not in killed:
                killed.append("node")
                kill(running, "site-3-node")
                timers.append(threading.Timer(60, start_supernode, (running, "site-3")))
                timers[-1].start()

        run_app(
            experiment, tmp_path / "out", SUPERLINK, 3, base=tmp_path, timeouts=Timeouts(deadline=400), say=kill_after,
            environment=running.flower.environment,
        )  # fmt: skip
        for timer in timers:
            timer.join()
    assert killed == ["app", "site", "node"]
    assert_same_run(here, load_run(tmp_path / "out" / "seed-0"), experiment)


def kill(running, name):
    process = running.processes.running.pop(name)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def kill_server_app(folder):
    """kill -9 of the ServerApp's process, which the SuperLink of this test has started."""
    for file in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, folders = (file / "cmdline").read_text(), (file / "environ").read_text(errors="replace")
            if "flwr-serverapp" in command and str(folder) in folders:
                os.kill(int(file.name), signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.slow
def test_an_experiment_that_is_not_approved_ends_the_run_with_the_name_of_the_site(tmp_path, alone):
    experiment = make_experiment("fedavg", rounds=2)
    with trial(tmp_path / "trial", experiment, tmp_path, 2, lambda line: None) as running:
        other = make_experiment("fedavg", rounds=3)
        refused = lambda: run_app(  # noqa: E731
            other, tmp_path / "out", SUPERLINK, 2, base=tmp_path, timeouts=Timeouts(deadline=60),
            environment=running.flower.environment,
        )  # fmt: skip
        assert_refused(refused, FederationError, "site 'site-", "not approved", experiment_hash(other)[:12])


def test_a_trial_over_configs_needs_their_approval(tmp_path):
    experiment = over_sites(make_experiment("fedavg"))
    service = make_services(tmp_path, ("a",), experiment)["a"]
    write_toml(tmp_path / "a" / "site.toml", service.settings.model_dump(mode="json", exclude={"part"}))
    other = make_experiment("fedavg", rounds=9)
    assert_refused(
        lambda: run_trial(other, tmp_path / "out", tmp_path, [tmp_path / "a" / "site.toml"]), ValueError,
        "'a' has not approved",
    )  # fmt: skip
