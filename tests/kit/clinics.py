"""A run over the folders of `ppfl federation init`, without Flower."""

from pathlib import Path

from kit.sites import FakeCarrier
from ppfl.federation.federated_run import run_federated
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import load_site
from ppfl.runs import load_experiment

CLINICS = ("north", "south")


def run_over_folders(place: Path) -> str:
    """As the server and the sites do it; the name that the sites give to the run."""
    folders = {name: place / "sites" / name for name in CLINICS}
    services = {name: SiteService(load_site(folder / "site.toml"), folder) for name, folder in folders.items()}
    carrier = FakeCarrier(services)
    experiment = load_experiment(place / "server" / "experiment.toml")
    clock = {"now": carrier.now, "sleep": carrier.sleep}
    run_federated(experiment, place / "server" / "runs", carrier, sites=CLINICS, **clock)
    (run,) = services["north"].store.runs()
    for service in services.values():
        service.close()
    return run
