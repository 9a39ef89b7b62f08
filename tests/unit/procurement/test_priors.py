import numpy as np
import pytest
from scipy import integrate, stats

from labkit.procurement.priors import (
    DiscretePrior,
    EmpiricalPrior,
    MixturePrior,
    expected_cost,
    prior_key,
    spend_curve,
    stack,
    virtual_cost,
)

CONTINUOUS = {
    "uniform": stats.uniform(0.1, 0.8),
    "exponential": stats.expon(scale=0.5),
    "lognormal": stats.lognorm(0.6, scale=0.5),
    "truncated normal": stats.truncnorm(-2, np.inf, loc=0.4, scale=0.2),
    "square": stats.beta(2, 1, scale=0.8),
    "square root": stats.beta(0.5, 1, scale=1.2),
}
CHEAP_OR_DEAR = MixturePrior([stats.uniform(0, 0.2), stats.uniform(0.8, 0.2)], [0.5, 0.5])
THREE_TYPES = DiscretePrior([0.1, 0.3, 0.6], [0.2, 0.5, 0.3])


@pytest.fixture(params=CONTINUOUS, ids=lambda name: name.replace(" ", "_"))
def prior(request):
    return CONTINUOUS[request.param]


@pytest.fixture(params=range(8))
def discrete(request):
    rng = np.random.default_rng(request.param)
    return DiscretePrior(np.sort(rng.uniform(0, 1, 7)), rng.dirichlet(np.ones(7)))


# virtual costs


def test_the_spend_curve_has_the_virtual_cost_as_its_slope(prior):
    q, h = np.linspace(0.05, 0.9, 18), 1e-6
    slope = ((q + h) * prior.ppf(q + h) - (q - h) * prior.ppf(q - h)) / (2 * h)
    np.testing.assert_allclose(slope, virtual_cost(prior, prior.ppf(q)), rtol=1e-7)


def test_the_virtual_cost_of_a_uniform_cost_is_twice_the_cost():
    c = np.linspace(0, 3, 7)
    np.testing.assert_allclose(virtual_cost(stats.uniform(0, 3), c), 2 * c, rtol=1e-15)


def test_the_virtual_cost_of_an_exponential_cost():
    c, rate = np.linspace(0, 2, 9), 2.0
    np.testing.assert_allclose(virtual_cost(stats.expon(scale=1 / rate), c), c + np.expm1(rate * c) / rate, rtol=1e-12)


@pytest.mark.parametrize(("alpha", "top"), [(1, 1.0), (2, 0.8), (0.5, 1.2)])
def test_the_virtual_cost_of_a_power_law(alpha, top):
    c = np.linspace(0, top, 9)
    np.testing.assert_allclose(virtual_cost(stats.beta(alpha, 1, scale=top), c), c * (1 + 1 / alpha), rtol=1e-12)


def test_log_concave_distributions_are_regular_and_ironing_leaves_them_alone(prior):
    c = prior.ppf(np.linspace(0.001, 0.999, 500))
    phi = virtual_cost(prior, c)
    assert (np.diff(phi) > 0).all()
    np.testing.assert_array_equal(virtual_cost(prior, c, ironed=True), phi)


def test_below_the_support_the_virtual_cost_is_the_cost_and_above_it_infinite():
    np.testing.assert_array_equal(virtual_cost(stats.uniform(0.5, 1), [0.2, 0.5, 2.0]), [0.2, 0.5, np.inf])


def test_virtual_costs_of_types_are_slopes_of_the_spend_curve(discrete):
    c, f = discrete.costs, discrete.probs
    F = np.cumsum(f)
    slopes = np.diff(np.append(0, F * c)) / f
    below = np.append(0, F[:-1])
    np.testing.assert_allclose(virtual_cost(discrete, c), slopes, rtol=1e-12)
    np.testing.assert_allclose(slopes, c + (c - np.append(0, c[:-1])) * below / f, rtol=1e-9)


def test_ironed_virtual_costs_of_types_are_slopes_of_the_lower_convex_envelope(discrete):
    F = np.append(0, np.cumsum(discrete.probs))
    R = F * np.append(0, discrete.costs)
    m = len(discrete.costs)
    chords = [[[(R[k] - R[i]) / (F[k] - F[i]) for k in range(j + 1, m + 1)] for i in range(j + 1)] for j in range(m)]
    envelope = [max(min(row) for row in chord) for chord in chords]
    np.testing.assert_allclose(virtual_cost(discrete, discrete.costs, ironed=True), envelope, rtol=1e-9)


def test_ironing_an_irregular_mixture_pools_all_of_its_dear_part():
    c = np.array([0.1, 0.2, 0.8, 0.9, 1.0])
    np.testing.assert_allclose(virtual_cost(CHEAP_OR_DEAR, c), [0.2, 0.4, 1.0, 1.2, 1.4], rtol=1e-12)
    # the chord from q = 1/2, R = 0.1 to q = 1, R = 1 lies below the curve
    np.testing.assert_allclose(virtual_cost(CHEAP_OR_DEAR, c, ironed=True), [0.2, 0.4, 1.8, 1.8, 1.8], rtol=1e-12)


def test_ironed_virtual_costs_never_decrease():
    mixture = MixturePrior([stats.uniform(0, 1), stats.uniform(0.5, 0.1)], [0.5, 0.5])
    c = np.linspace(0, 1, 400)
    assert (np.diff(virtual_cost(mixture, c)) < -0.1).any()
    assert (np.diff(virtual_cost(mixture, c, ironed=True)) >= -1e-6).all()


def test_a_cost_that_is_no_type_has_no_virtual_cost():
    with pytest.raises(ValueError, match=r"c=0\.2: expected types of the prior, \[0\.1 0\.3 0\.6\]"):
        virtual_cost(THREE_TYPES, 0.2)
    with pytest.raises(ValueError, match=r"c=0\.7: expected types"):
        virtual_cost(THREE_TYPES, 0.7)


# expected cost and spend curves


def test_the_expected_cost_below_a_price_is_the_integral_of_cost_times_density(prior):
    prices = prior.ppf([0.02, 0.5, 0.97])
    want = [integrate.quad(lambda c: c * prior.pdf(c), prior.ppf(0), p, epsabs=1e-13, limit=200)[0] for p in prices]
    np.testing.assert_allclose(expected_cost(prior, prices), want, rtol=1e-10, atol=1e-13)
    assert expected_cost(prior, prior.ppf(1 - 1e-12)) == pytest.approx(prior.mean(), abs=1e-9)


def test_the_expected_cost_of_types_is_a_sum():
    np.testing.assert_allclose(expected_cost(THREE_TYPES, [0.05, 0.1, 0.5, 0.6]), [0, 0.02, 0.17, 0.35], rtol=1e-12)
    assert THREE_TYPES.mean() == pytest.approx(0.35)


def test_the_expected_cost_of_a_mixture_mixes():
    np.testing.assert_allclose(expected_cost(CHEAP_OR_DEAR, [0.2, 0.5, 1.0]), [0.05, 0.05, 0.5], rtol=1e-12)
    assert CHEAP_OR_DEAR.mean() == pytest.approx(0.5)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_the_curves_error_falls_with_the_square_of_the_grid(name):
    prior = CONTINUOUS[name]
    error = []
    for grid in (64, 512):
        curve = spend_curve(prior, grid, top=prior.ppf(0.9))
        np.testing.assert_allclose(curve.spends, curve.probs * curve.prices, rtol=1e-15)
        np.testing.assert_allclose(curve.probs, prior.cdf(curve.prices), rtol=1e-12)
        assert (np.diff(curve.prices) >= 0).all()
        error.append(np.abs(curve.costs - expected_cost(prior, curve.prices)).max())
    assert error[1] < max(error[0] / 30, 1e-15)
    assert error[1] < 1e-5


def test_the_points_of_a_discrete_curve_are_its_types():
    curve = spend_curve(THREE_TYPES)
    np.testing.assert_array_equal(curve.prices[1:], THREE_TYPES.costs)
    np.testing.assert_allclose(curve.probs, [0, 0.2, 0.7, 1.0])
    np.testing.assert_allclose(curve.spends, [0, 0.02, 0.21, 0.6])
    np.testing.assert_allclose(curve.costs, [0, 0.02, 0.17, 0.35])
    assert THREE_TYPES.cdf(curve.prices[0]) == 0
    assert len(spend_curve(THREE_TYPES, top=0.3).prices) == 3


@pytest.mark.parametrize("grid", [7, 9.5])
def test_a_curve_needs_eight_prices(grid):
    with pytest.raises(ValueError, match=f"grid={grid}: expected an int >= 8"):
        spend_curve(stats.uniform(), grid=grid)


@pytest.mark.parametrize("top", [np.nan, 0.0, -1.0, "1"])
def test_the_highest_price_of_a_curve_is_a_positive_number(top):
    with pytest.raises(ValueError, match=f"top={top!r}: expected a number > 0 or inf"):
        spend_curve(stats.uniform(), top=top)


@pytest.mark.parametrize("family", [stats.uniform, stats.lognorm])
def test_a_family_is_no_distribution_until_its_parameters_are_chosen(family):
    message = rf"is the family {family.name}: expected one of its members, stats\.{family.name}\(…\)"
    for call in (spend_curve, lambda prior: virtual_cost(prior, [0.1]), lambda prior: MixturePrior([prior], [1.0])):
        with pytest.raises(ValueError, match=message):
            call(family)


# the priors themselves


@pytest.mark.parametrize("prior", [THREE_TYPES, CHEAP_OR_DEAR, EmpiricalPrior([2.0, 1.0, 2.0])], ids=["types", "mix", "sample"])
def test_the_quantile_function_is_the_lowest_cost_that_reaches_a_probability(prior):
    q = np.linspace(0.001, 1, 200)
    c = prior.ppf(q)
    assert (prior.cdf(c) >= q - 1e-15).all()
    assert (prior.cdf(c - 1e-9) < q).all()
    assert prior.ppf(0.0) == prior.support()[0]
    assert prior.ppf(1.0) == prior.support()[1]


def test_a_mixture_skips_the_gap_between_its_components():
    np.testing.assert_allclose(CHEAP_OR_DEAR.ppf([0.25, 0.5, 0.5 + 1e-9, 0.75]), [0.1, 0.2, 0.8, 0.9], rtol=1e-7)
    assert CHEAP_OR_DEAR.pdf(0.5) == 0
    np.testing.assert_array_equal(CHEAP_OR_DEAR.kinks, [0, 0.2, 0.8, 1])


@pytest.mark.parametrize(
    "prior", [THREE_TYPES, CHEAP_OR_DEAR, EmpiricalPrior([0.5, 0.25, 0.5])], ids=["types", "mix", "sample"]
)
def test_draws_follow_the_distribution(prior):
    draws = prior.rvs(size=40_000, random_state=np.random.default_rng(3))
    assert draws.shape == (40_000,)
    for c in (0.15, 0.3, 0.5, 0.9):
        p = prior.cdf(c)
        assert abs((draws <= c).mean() - p) <= 4 * np.sqrt(p * (1 - p) / 40_000)


def test_an_empirical_prior_counts_repeated_samples():
    prior = EmpiricalPrior([0.5, 0.25, 0.5, 1.0])
    np.testing.assert_array_equal(prior.costs, [0.25, 0.5, 1.0])
    np.testing.assert_array_equal(prior.probs, [0.25, 0.5, 0.25])


def test_an_empirical_prior_of_distinct_samples_is_the_discrete_prior_of_equal_weights():
    samples = np.random.default_rng(0).uniform(0, 1, 11)
    assert prior_key(EmpiricalPrior(samples)) == prior_key(DiscretePrior(np.sort(samples), np.full(11, 1 / 11)))


def test_stacked_priors_give_what_each_gives_alone():
    priors = [
        stats.uniform(0, 1.3),
        stats.lognorm(0.6, scale=0.4),
        stats.uniform(0, 0.7),
        THREE_TYPES,
        stats.lognorm(0.5, scale=0.9),
        CHEAP_OR_DEAR,
        stats.uniform(loc=0.1, scale=0.5),
        THREE_TYPES,
    ]
    groups = stack(priors)
    assert sorted(len(index) for _, index in groups) == [1, 1, 2, 2, 2]
    c = np.linspace(0.05, 1.5, 12).reshape(3, 4)
    for prior, index in groups:
        columns = np.repeat(c.reshape(-1, 1), len(index), axis=1)
        for method in ("cdf", "ppf"):
            argument = columns / 2 if method == "ppf" else columns
            want = np.stack([getattr(priors[i], method)(argument[:, 0]) for i in index], axis=1)
            np.testing.assert_array_equal(getattr(prior, method)(argument), want)


def test_a_histogram_is_stacked_with_nothing_but_itself():
    first, second = (stats.rv_histogram(np.histogram([0.1, x, 0.5], bins=4), density=True)() for x in (0.2, 0.3))
    assert [index.tolist() for _, index in stack([first, second, first])] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("costs", "probs", "message"),
    [
        ([0.2, 0.1], [0.5, 0.5], "expected finite types ≥ 0 in increasing order, each once"),
        ([0.1, 0.1], [0.5, 0.5], "expected finite types ≥ 0 in increasing order, each once"),
        ([-0.1, 0.1], [0.5, 0.5], "expected finite types ≥ 0"),
        ([0.1, np.nan], [0.5, 0.5], "expected finite types ≥ 0"),
        ([0.1, 0.2], [0.5, 0.4], r"expected numbers > 0 that sum to 1, got the sum 0\.9"),
        ([0.1, 0.2], [1.5, -0.5], "expected numbers > 0 that sum to 1"),
        (["0.1"], [1.0], r"costs=\['0\.1'\]: expected finite types ≥ 0 in increasing order"),
        ([0.1], ["1"], r"probs=\['1'\]: expected numbers > 0 that sum to 1"),
        ([0.1, 0.2], [1.0], r"costs \(2,\), probs \(1,\): expected two arrays \(m,\)"),
        ([], [], r"costs \(0,\), probs \(0,\): expected two arrays \(m,\) with m ≥ 1"),
    ],
)
def test_bad_types_are_refused(costs, probs, message):
    with pytest.raises(ValueError, match=message):
        DiscretePrior(costs, probs)


def test_probabilities_may_miss_one_by_rounding():
    DiscretePrior([0.1, 0.2], [0.5, 0.5 + 9e-10])
    with pytest.raises(ValueError, match="sum to 1"):
        DiscretePrior([0.1, 0.2], [0.5, 0.5 + 2e-9])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], r"samples of shape \(0,\): expected \(m,\) with m ≥ 1"),
        ([[0.1, 0.2]], r"samples of shape \(1, 2\): expected \(m,\) with m ≥ 1"),
        ([0.1, np.inf], r"samples\[1\]=inf: expected finite numbers ≥ 0"),
        ([-1.0, 2.0], r"samples\[0\]=-1\.0: expected finite numbers ≥ 0"),
        (["a"], r"samples=\['a'\]: expected finite numbers ≥ 0"),
    ],
)
def test_bad_samples_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        EmpiricalPrior(samples)


def test_bad_mixtures_are_refused():
    with pytest.raises(ValueError, match=r"2 components, weights \(1,\): expected one weight each"):
        MixturePrior([stats.uniform(), stats.expon()], [1.0])
    with pytest.raises(ValueError, match=r"expected numbers > 0 that sum to 1, got the sum 0\.7"):
        MixturePrior([stats.uniform(), stats.expon()], [0.5, 0.2])
    with pytest.raises(ValueError, match=r"components\[1\] has no pdf: expected a continuous prior"):
        MixturePrior([stats.uniform(), THREE_TYPES], [0.5, 0.5])
