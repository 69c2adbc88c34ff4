"""`[affinity]` of an experiment file: who resembles whom, computed from the clients' training data."""

from typing import Annotated, Literal

from pydantic import Field

from ..algorithms.contract import Method
from ..core import affinity
from ..core.affinity import Affinity
from ..core.settings import Count, Settings
from ..data.federation import Federation
from ..data.limits import check_limit
from ..errors import AffinityError


class LabelAffinity(Settings):
    """Cosine similarity of training label counts, as in the paper's experiments."""

    name: Literal["labels"] = "labels"

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """W = H H', never formed."""
        return affinity.from_labels(federation.label_counts(), federation.ids)


class FeatureAffinity(Settings):
    """Similarity of the clients' mean features."""

    name: Literal["features"] = "features"

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """A dense W, (M, M)."""
        size = federation.n_clients**2 * federation.weights.itemsize
        what = f"similarities of {federation.n_clients:,} clients take {size:,} bytes"
        check_limit("bytes", size, what, "use the affinity 'nearest' or 'labels', or ", AffinityError)
        return affinity.from_features(federation.feature_means(), federation.ids)


class NearestAffinity(Settings):
    """Each client with the few whose mean features are nearest."""

    name: Literal["nearest"] = "nearest"
    neighbours: Count = 5

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """A sparse W."""
        return affinity.nearest(federation.feature_means(), federation.ids, self.neighbours)


class UniformAffinity(Settings):
    """Everyone alike (Theorem 1)."""

    name: Literal["uniform"] = "uniform"

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """W = 1 1'."""
        return affinity.uniform(federation.ids)


class NoAffinity(Settings):
    """No client pulls another."""

    name: Literal["none"] = "none"

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """None."""
        return None


class AutoAffinity(Settings):
    """Label counts where the method pulls memberships together and the data have labels, else none."""

    name: Literal["auto"] = "auto"

    def build(self, federation: Federation, method: Method) -> Affinity | None:
        """As `labels` or as `none`."""
        pulls = method.uses_affinity and federation.n_classes is not None
        return LabelAffinity().build(federation, method) if pulls else None


AffinitySettings = Annotated[
    AutoAffinity | LabelAffinity | FeatureAffinity | NearestAffinity | UniformAffinity | NoAffinity,
    Field(discriminator="name"),
]
