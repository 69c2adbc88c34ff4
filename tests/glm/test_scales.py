"""Units do not matter: coefficients follow the scale of y and x, shifts change the intercept, or it is refused."""

import numpy as np
import pytest
import scipy.sparse as sp

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.core.errors import DataError
from ppfl.glm.column_spread import PrecisionWarning

TABLE = make_client_table()


@pytest.fixture(scope="module")
def plain():
    return regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)


@pytest.mark.parametrize("s", [1e-60, 1e-9, 1e9, 1e60])
def test_scaling_y_scales_all_coefficients(plain, s):
    model = regressor().fit(TABLE.x, s * TABLE.y, clients=TABLE.clients)
    np.testing.assert_allclose(model.canonical_coef_, s * plain.canonical_coef_, rtol=1e-6)
    np.testing.assert_allclose(model.canonical_intercept_, s * plain.canonical_intercept_, rtol=1e-6)
    np.testing.assert_allclose(model.memberships_, plain.memberships_, atol=1e-6)
    assert model.score(TABLE.x, s * TABLE.y, TABLE.clients) == pytest.approx(
        plain.score(TABLE.x, TABLE.y, TABLE.clients)
    )


@pytest.mark.parametrize("table", [np.asarray, sp.csr_array])
@pytest.mark.parametrize("s", [1e-60, 1e60])
def test_scaling_a_column_scales_its_coefficient(s, table):
    units = np.array([1.0, s])
    before = regressor().fit(table(TABLE.x), TABLE.y, clients=TABLE.clients)
    after = regressor().fit(table(TABLE.x * units), TABLE.y, clients=TABLE.clients)
    np.testing.assert_allclose(after.canonical_coef_ * units, before.canonical_coef_, rtol=1e-6)


@pytest.mark.parametrize(("shift", "tolerance"), [(1e6, 1e-6), (1e9, 1e-6), (1e13, 1e-3)])
def test_shifting_a_column_changes_the_intercept_alone(plain, shift, tolerance):
    """Floating-point numbers near 1e13 are 0.002 apart, so that is how exact the slopes can be."""
    moved = TABLE.x + [shift, 0.0]
    if shift == 1e13:
        with pytest.warns(PrecisionWarning, match="column 'x0' varies by .* few of its digits"):
            model = regressor().fit(moved, TABLE.y, clients=TABLE.clients)
    else:
        model = regressor().fit(moved, TABLE.y, clients=TABLE.clients)
    np.testing.assert_allclose(model.canonical_coef_, plain.canonical_coef_, atol=tolerance)
    np.testing.assert_allclose(
        model.predict(moved, TABLE.clients), plain.predict(TABLE.x, TABLE.clients), atol=10 * tolerance
    )


@pytest.mark.parametrize("s", [1e-9, 1e9])
def test_with_a_log_link_the_intercept_takes_up_the_scale_of_y(s):
    for settings in ({"link": "log"}, {"family": "gamma"}):
        before = regressor(**settings).fit(TABLE.x, TABLE.amounts, clients=TABLE.clients)
        after = regressor(**settings).fit(TABLE.x, s * TABLE.amounts, clients=TABLE.clients)
        np.testing.assert_allclose(after.canonical_coef_, before.canonical_coef_, atol=1e-5)
        np.testing.assert_allclose(
            after.predict(TABLE.x, TABLE.clients), s * before.predict(TABLE.x, TABLE.clients), rtol=1e-4
        )
        shift = len(TABLE.y) * np.log(s)  # of the density
        assert after.log_likelihood_ == pytest.approx(before.log_likelihood_ - shift, abs=1e-3)  # the integral's error


@pytest.mark.parametrize(
    ("x", "y", "word"),
    [
        (1.0, 1e-200, "target 'y' varies by at most .*multiply it by 1e[+]200"),
        (1.0, 1e160, "target 'y' has numbers as large as .*divide it by 1e[+]160"),
        (1e300, 1.0, "column 'x0' has numbers as large as .*divide it by 1e[+]300"),
        (1e-200, 1.0, "column 'x0' varies by at most"),
    ],
)
def test_numbers_whose_squares_overflow_or_vanish_are_refused(x, y, word):
    for table in (TABLE.x * [x, 1.0], sp.csr_array(TABLE.x * [x, 1.0])):
        with pytest.raises(DataError, match=word):
            regressor().fit(table, TABLE.y * y, clients=TABLE.clients)
    if x != 1:
        with pytest.raises(DataError, match="column 'x0'"):
            classifier().fit(TABLE.x * [x, 1.0], TABLE.labels, clients=TABLE.clients)
        choices = make_choice_table()
        with pytest.raises(DataError, match="column 'x0'"):
            choice().fit(choices.x * [x, 1.0], choices.y, choices.situations, choices.clients)


def test_means_that_no_exponential_reaches_are_refused():
    with pytest.raises(DataError, match="y is as large as .*below 1e[+]13.*divide it"):
        regressor(family="gamma").fit(TABLE.x, 1e20 * TABLE.amounts, clients=TABLE.clients)


def test_a_column_that_differs_by_rounding_errors_has_coefficient_zero_and_a_warning():
    noise = np.where(np.arange(len(TABLE.y)) % 2, 0.3, 0.1 + 0.2)
    with pytest.warns(PrecisionWarning, match="column 'x2' .*coefficient is set to 0"):
        model = regressor().fit(np.c_[TABLE.x, noise], TABLE.y, clients=TABLE.clients)
    assert (model.canonical_coef_[:, 2] == 0).all()


def test_a_sparse_column_that_hardly_varies_is_refused():
    with pytest.raises(DataError, match="column 'x0' of a sparse table varies by only .*dense"):
        regressor().fit(sp.csr_array(TABLE.x + [1e9, 0.0]), TABLE.y, clients=TABLE.clients)
