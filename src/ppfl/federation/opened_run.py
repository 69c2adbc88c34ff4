"""The experiment that a server names, as a site takes it: with its own data, and no function that it does not allow."""

from __future__ import annotations

from pathlib import Path

from ..core.registry import Imports, python_names
from ..errors import SettingError
from ..runs.experiment import Experiment
from .site_requests import OpenRun
from .site_settings import SiteSettings


def experiment_of(request: OpenRun, site: SiteSettings, base: Path | None) -> Experiment:
    """The experiment of a run; SettingError where the site does not allow it. Modules in `base` come first."""
    settings = {**request.settings, "data": site.data.model_dump(mode="json"), "device": "cpu"}
    for name in python_names(settings):
        if name not in site.allow:
            raise SettingError(
                f"the server names {name!r:.80}, and site {site.name!r} allows "
                f"{', '.join(site.allow) or 'none'}; its owner may add it to `allow` in site.toml"
            )
    try:
        return Experiment.model_validate(settings, context=Imports(base, (*site.allow, site.data.name)))
    except ValueError as error:
        raise SettingError(f"the server's experiment cannot be used here ({' '.join(str(error).split())})") from None
