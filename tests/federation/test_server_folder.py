"""From `ppfl federation init` to a run: a server and sites, each with nothing but its own folder."""

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install ppfl[flower]")
pytest.importorskip("cryptography", reason="cryptography is not installed; pip install ppfl[flower]")

from federation.test_federated_run import assert_same_run, make_experiment
from ppfl.core.errors import DataError, SettingError
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.flower_link import control_client, register_only, wait_for
from ppfl.federation.flower_processes import LOOPBACK, LinkFiles, Processes, free_port, start_superlink
from ppfl.federation.provisioning import init_federation, registered_sites, revoke_site
from ppfl.federation.server_run import run_server
from ppfl.federation.site_mail import Patience
from ppfl.federation.site_models import load_site_models
from ppfl.federation.site_settings import load_site
from ppfl.fitted import load
from ppfl.runs import run
from ppfl.runs.storage import write_toml

SITES = ("north", "south")


def make_folders(folder: Path, experiment) -> Path:
    file, out = folder / "experiment.toml", folder / "clinics"
    write_toml(file, experiment.model_dump(mode="json", exclude_none=True))
    init_federation(file, SITES, LOOPBACK, out, port=free_port())
    for number, name in enumerate(SITES, 1):
        config = out / "sites" / name / "site.toml"
        text = config.read_text().replace("\n[data]", f"\n[part]\nnumber = {number}\nof = {len(SITES)}\n\n[data]", 1)
        config.write_text(text.replace("# secure_sums =", "secure_sums ="))
    return out


def run_with_sites(out: Path, runs: Path, configs: dict[str, Path]):
    with Processes(runs.with_suffix(".logs")) as processes:
        for name, config in configs.items():
            command = [sys.executable, "-m", "ppfl", "federation", "site", str(config), "--end-with-parent"]
            processes.start(name, command, {"PYTHONPATH": os.pathsep.join(sys.path)})
        patience = Patience(deadline=300, resend=30, at_least=2)
        return run_server(out / "server", runs, host=LOOPBACK, secure=True, patience=patience)


def table_config(folder: Path, column: str) -> Path:
    """The config of a site whose table has this column."""
    rows = [f"p{i % 3},{i},{i % 2}" for i in range(12)]
    (folder / "t.csv").write_text("\n".join([f"who,{column},y", *rows]))
    settings, _ = (folder / "site.toml").read_text().split("\n[part]")
    data = 'name = "csv"\nfile = "t.csv"\nclient = "who"\ntarget = "y"\ntask = "classification"'
    (folder / "table.toml").write_text(f"{settings}\n[data]\n{data}\n")
    return folder / "table.toml"


def test_folders_of_init_refuse_a_wrong_column_train_with_secure_sums_and_take_out_revoked_keys(tmp_path, our_turn):
    experiment = make_experiment("fedavg", rounds=2, watch={"every": 2, "report_clients": False})
    out = make_folders(tmp_path, experiment)
    columns = {"north": "age", "south": "weight"}
    tables = {name: table_config(out / "sites" / name, column) for name, column in columns.items()}
    with pytest.raises(DataError, match="'south' does not fit: features .* lacks 'age' and it has 'weight'"):
        run_with_sites(out, tmp_path / "refused", tables)
    configs = {name: out / "sites" / name / "site.toml" for name in SITES}
    (there,) = run_with_sites(out, tmp_path / "runs", configs)
    (here,) = run(experiment, tmp_path / "alone")
    assert_same_run(here, there, experiment)
    for name in SITES:  # each site has its clients' models, and nothing but its folder is needed for them
        folder = out / "sites" / name
        models = load_site_models(load_site(folder / "site.toml"), folder)
        x = torch.rand(3, *models.kind.shape)
        expected = load(here.folder).predict(models.ids[0], x)
        torch.testing.assert_close(models.predict(models.ids[0], x), expected, rtol=0, atol=1e-5)

    revoke_site(out, "south")
    server = out / "server"
    files = LinkFiles(*(server / name for name in ("server.pem", "server.key", "authority.pem", "secret")))
    with Processes(tmp_path / "logs") as processes:
        link = start_superlink(processes, files, server / "superlink.sqlite")
        before = wait_for(lambda: nodes(link), "the SuperLink")
        register_only(link, registered_sites(server))
        assert {node.name for node in before} == set(SITES)  # from the database
        assert {node.name for node in nodes(link)} == {"north"}


def nodes(link):
    from flwr.proto.control_pb2 import ListNodesRequest

    client = control_client(link)
    try:
        return [node for node in client.ListNodes(ListNodesRequest()).nodes_info if not node.unregistered_at]
    finally:
        client.close()


def test_what_cannot_work_is_said_before_anyone_waits(tmp_path):
    with pytest.raises(FederationError, match=r"has no server\.pem"):
        run_server(tmp_path, tmp_path / "runs")
    out = make_folders(tmp_path, make_experiment("fedavg"))
    with pytest.raises(SettingError, match="report_clients = false"):
        run_server(out / "server", tmp_path / "runs", secure=True)
    (out / "server" / "experiment.toml").unlink()
    watch = {"report_clients": False}
    write_toml(
        out / "server" / "experiment.toml",
        make_experiment("ppfl-outputs", watch=watch).model_dump(mode="json", exclude_none=True),
    )
    with pytest.raises(SettingError, match="share_memberships = false"):
        run_server(out / "server", tmp_path / "runs", secure=True)
