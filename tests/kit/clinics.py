"""Folders of `ppfl federation init` with data at each site, and a run over them without Flower."""

from pathlib import Path

from kit.sites import FakeCarrier, write_visits
from ppfl.federation.federated_run import run_federated
from ppfl.federation.site_service import SiteService
from ppfl.federation.site_settings import load_site
from ppfl.runs import load_experiment

CLINICS = ("north", "south")


def write_tables(place: Path) -> None:
    for name in CLINICS:
        write_visits(place / "sites" / name)


def run_over_folders(place: Path) -> None:
    """As the server and the sites do it."""
    services = {name: _service(place, name) for name in CLINICS}
    carrier = FakeCarrier(services)
    experiment = load_experiment(place / "server" / "experiment.toml")
    clock = {"now": carrier.clock.now, "sleep": carrier.clock.sleep}
    run_federated(experiment, place / "server" / "runs", carrier, sites=CLINICS, **clock)
    for service in services.values():
        service.close()


def runs_of_site(place: Path, name: str) -> list[str]:
    """The names of the runs that a site has taken part in."""
    service = _service(place, name)
    runs = list(service.store.runs())
    service.close()
    return runs


def _service(place: Path, name: str) -> SiteService:
    folder = place / "sites" / name
    return SiteService(load_site(folder / "site.toml"), folder)
