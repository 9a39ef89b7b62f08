"""Budget-feasible procurement beyond value: utility, welfare and their mixtures (lab 04, arXiv:2607.00101).

    Market → solve_ex_ante → posted prices, clock → Outcome → audit

`priors` what the buyer believes about a cost, `market` sellers and objectives, `outcome` who sells at what payment, `ex_ante`
the optimum whose budget holds in expectation, `posted_prices` and `clock` mechanisms whose budget always holds, `prior_free`
what works without beliefs, `knapsack` the first-best, `lp` exact optima of small markets, `auditing` the search for a
profitable lie; then `experiment`, `figures` and `widgets`.
"""

from labkit.lazy import public

_HOME = {
    "priors": ("DiscretePrior", "EmpiricalPrior", "MixturePrior", "SpendCurve", "spend_curve", "virtual_cost"),
    "market": ("UTILITY", "VALUE", "WELFARE", "Market", "Objective"),
    "outcome": ("Outcome",),
    "ex_ante": ("Envelope", "ExAnteSolution", "envelope", "ex_ante_mechanism", "prices_at", "solve_ex_ante"),
    "posted_prices": (
        "UNCONDITIONAL_BOUND",
        "adaptive_posted_prices",
        "iid_posted_price_ratio",
        "monopsony_posted_prices",
        "optimal_sequential_prices",
        "post_prices",
        "posted_price_bound",
        "sequential_posted_prices",
        "uniform_posted_price",
    ),
    "clock": ("PricePath", "bayesian_clock", "clock_auction", "iid_clock_value", "price_path"),
    "prior_free": (
        "PriceLottery",
        "ValueClockOutcome",
        "best_single_seller",
        "pay_as_bid_greedy",
        "prior_free_utility_lottery",
        "prior_free_utility_ratio",
        "prior_free_welfare",
        "value_clock",
    ),
    "knapsack": ("first_best",),
    "lp": ("LPSolution", "optimal_mechanism_lp", "prior_free_utility_lp"),
    "auditing": ("AuditReport", "Violation", "audit", "threshold_payments"),
}

__getattr__, __dir__, __all__ = public(__name__, _HOME)
