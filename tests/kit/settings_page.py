"""What docs/settings.md says of keys and defaults, beside the classes of settings."""

import re
import tomllib

from ppfl.algorithms import METHODS
from ppfl.algorithms.fedavg import Averaging
from ppfl.algorithms.server_optimizers import Adagrad, Adam, Momentum, Yogi
from ppfl.data import DATASETS, PARTITIONS, PreparationSettings
from ppfl.data.ids import Holdout
from ppfl.networks import NETWORKS
from ppfl.runs import Experiment
from ppfl.runs.affinities import AFFINITIES
from ppfl.runs.experiment import EstimatorSettings, PopulationSettings, StartSettings
from ppfl.server import Watch

TABLES = ("data", "preparation", "model", "population", "method", "affinity", "watch", "start", "estimator")
SHARED = ("name", "partition", "adapters", *Holdout.model_fields)  # described once for several names


def faults(page):
    """Keys that the page does not have, and defaults that are others."""
    top, data, preparation, model, population, method, affinity, watch, rest = re.split(r"^## ", page, flags=re.M)[1:]
    found = _faults(Experiment, top, but=TABLES)
    pairs = [(PreparationSettings, preparation), (PopulationSettings, population), (Watch, watch)]
    for kind, section in (*pairs, (StartSettings, rest), (EstimatorSettings, rest)):
        found += _faults(kind, section)
    for registry, section in ((DATASETS, data), (PARTITIONS, data), (NETWORKS, model), (AFFINITIES, affinity)):
        for name, kind in registry.items():
            if name != "parquet":  # it has "the same" keys as csv
                found += _faults(kind, _line(f"`{name}`", section), but=SHARED)
    common, of_ppfl, others = re.split(r"^`ppfl` has|^\| method \|", method, flags=re.M)
    found += _faults(Averaging, common)
    for name, kind in METHODS.items():
        found += _faults(kind, of_ppfl if name == "ppfl" else _line(f"`{name}`", others), but=Averaging.model_fields)
    for kind in (Momentum, Adagrad, Adam, Yogi):
        found += _faults(kind, others.rpartition("`server_optimizer`")[2], but=("name", "lr", "beta1"))
    return found


def _faults(kind, section, but=()):
    documented = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.M))
    for code in re.findall(r"`([^`\n]+)`", section):
        key, _, default = code.partition(" = ")
        documented[key] = default or documented.get(key)
    found = []
    for key, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        written = documented.get(key, "")
        if key in but or written is None:
            continue
        if not written:
            found.append(f"{kind.__name__} has {key}, and the page has not")
        elif not _agree(written.strip("`"), list(default) if isinstance(default, tuple) else default):
            found.append(f"{key} of {kind.__name__} is {default!r}, and on the page {written}")
    return found


def _agree(written, default):
    """Whether a default is what is written, where that is a value and not words."""
    try:
        value = tomllib.loads(f"x = {written}")["x"]
    except tomllib.TOMLDecodeError:
        return True
    return value == default or [value] == default


def _line(start, section):
    """The row of a table with this in it; nothing where there is none."""
    return next((line for line in section.splitlines() if line.startswith("|") and start in line), "")
