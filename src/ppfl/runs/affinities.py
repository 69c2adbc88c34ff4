"""`[affinity]` of an experiment file: who resembles whom, computed from the clients' training data."""

from typing import Annotated

from ..algorithms.contract import Method
from ..core import affinity
from ..core.affinity import Affinity
from ..core.registry import Functions, NamedCall
from ..core.settings import Count
from ..data.federation import Federation
from ..data.files import check_limit
from ..errors import AffinityError, SettingError

AFFINITIES = Functions("affinity", "affinity", given=("federation", "method"), error=AffinityError)
AffinityByName = Annotated[NamedCall, AFFINITIES.field()]


@AFFINITIES.register("auto")
def auto(federation: Federation, method: Method) -> Affinity | None:
    """Label counts where the method pulls memberships together, else none."""
    if not method.uses_affinity:
        return None
    if federation.n_classes is None:
        raise SettingError(
            "[method] has a penalty between clients, and targets that are numbers do not say which clients resemble "
            'each other; set [affinity] name to "features", "nearest" or "uniform", or penalty = 0'
        )
    return labels(federation)


@AFFINITIES.register("labels")
def labels(federation: Federation) -> Affinity:
    """Cosine similarity of training label counts, as in the paper's experiments. W = H H' is never formed."""
    return affinity.from_labels(federation.label_counts(), federation.ids)


@AFFINITIES.register("features")
def features(federation: Federation) -> Affinity:
    """Similarity of the clients' mean features: a dense W, (M, M)."""
    size = federation.n_clients**2 * federation.weights.itemsize
    what = f"similarities of {federation.n_clients:,} clients take {size:,} bytes"
    check_limit("bytes", size, what, "use the affinity 'nearest' or 'labels', or ", AffinityError)
    return affinity.from_features(federation.feature_means(), federation.ids)


@AFFINITIES.register("nearest")
def nearest(federation: Federation, neighbours: Count = 5) -> Affinity:
    """Each client with the few whose mean features are nearest: a sparse W."""
    return affinity.nearest(federation.feature_means(), federation.ids, neighbours)


@AFFINITIES.register("uniform")
def uniform(federation: Federation) -> Affinity:
    """Everyone alike (Theorem 1): W = 1 1'."""
    return affinity.uniform(federation.ids)


@AFFINITIES.register("none")
def none() -> None:
    """No client pulls another."""
