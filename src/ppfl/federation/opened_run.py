"""The experiment that a server names, as a site takes it: with its own data, and no function that it does not allow."""

from __future__ import annotations

from ..errors import SettingError
from ..runs.experiment import Experiment
from .site_requests import OpenRun
from .site_settings import SiteSettings


def experiment_of(request: OpenRun, site: SiteSettings) -> Experiment:
    """The experiment of a run; SettingError where the site does not allow it."""
    settings = {**request.settings, "data": site.data.model_dump(mode="json"), "device": "cpu"}
    for name in named_functions(settings):
        if name not in site.allow:
            raise SettingError(
                f"the server names the function {name!r:.80}, and site {site.name!r} allows "
                f"{', '.join(site.allow) or 'none'}; its owner may add it to `allow` in site.toml"
            )
    try:
        return Experiment.model_validate(settings)
    except ValueError as error:
        raise SettingError(f"the server's experiment cannot be used here ({' '.join(str(error).split())})") from None


def named_functions(settings: dict[str, object]) -> list[str]:
    """Functions that the settings of an experiment name, for networks and metrics."""
    model, watch = settings.get("model"), settings.get("watch")
    factory = model.get("factory") if isinstance(model, dict) else None
    metrics = watch.get("metrics", ()) if isinstance(watch, dict) else ()
    return [str(name) for name in (factory, *metrics) if name is not None]
