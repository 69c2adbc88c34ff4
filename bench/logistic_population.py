"""A population of many small clients with known logistic models, all in memory.

In an experiment file beside it: name = "logistic_population:logistic_population".
"""

import numpy as np
import torch

from ppfl.core.settings import Count, CountOrZero, NonNegative, Positive, Seed
from ppfl.data import Federation, Samples, Truth
from ppfl.data.partitions import client_names


def logistic_population(
    n_clients: Count = 1000,
    samples: Count = 10,
    dim: Count = 20,
    k: Count = 5,
    alpha: Positive = 0.3,
    scale: NonNegative = 2.0,
    test_points: CountOrZero = 5,
    seed: Seed = 0,
) -> Federation:
    """A population of logistic regressions: P(y = 1 | x) = sigmoid(x . sum_k c_ik theta_k).

    c_i ~ Dirichlet(alpha); x ~ U(-1, 1)^dim; theta_k is normal with standard deviation `scale`; labels are less random
    for a larger scale. Client i does not depend on the number of clients, and a million clients need little more
    memory than their data.

    >>> few, many = logistic_population(n_clients=3), logistic_population(n_clients=30)
    >>> torch.equal(few.train.x, many.train.x[:30]), many.describe()
    (True, 'logistic: 30 clients, 300 train / 150 test samples (10-10 per client), x (20,), 2 classes, 5 true sources')
    """
    model_rng, client_rng, *point_rngs = np.random.default_rng(seed).spawn(6)  # one random stream per part
    theta = np.float32(scale) * model_rng.standard_normal((k, dim), dtype=np.float32)
    memberships = client_rng.dirichlet(np.full(k, alpha), n_clients).astype(np.float32)
    own = memberships @ theta

    def draw(x_rng: np.random.Generator, y_rng: np.random.Generator, count: int) -> Samples:
        x = 2 * x_rng.random((n_clients * count, dim), dtype=np.float32) - 1
        score = np.einsum("ind,id->in", x.reshape(n_clients, count, dim), own).ravel()
        y = y_rng.logistic(size=len(score)) < score  # the logistic distribution function is the sigmoid
        offsets = torch.arange(0, n_clients * count + 1, count)
        return Samples(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)), offsets)

    train = draw(point_rngs[0], point_rngs[1], samples)
    test = draw(point_rngs[2], point_rngs[3], test_points) if test_points else None
    truth = Truth(torch.from_numpy(memberships), "canonical model", torch.from_numpy(theta))
    return Federation(client_names(n_clients), train, test, truth=truth, name="logistic", classes=("0", "1"))
