"""SPON: activation-sparse language models with spontaneous neurons (lab 01, arXiv:2512.12744).

    calibrate → SparseModel → fit_spon → evaluate

`sites` where a model can be sparsified, `calibration` thresholds, `sparsifier` the sparse model, `spon` training, `allocation`
greedy sparsity per projection, `metrics` and `choice` quality, `theory` Gaussian and Laplace predictions, `sweep` many
sparsities at once, `kernels` and `decoding` the speed; then `experiment`, `figures` and `widgets`.
"""

from labkit.lazy import public

_HOME = {
    "calibration": ("Calibration", "calibrate"),
    "sites": ("INPUT_GROUPS", "Site", "find_sites", "site_inputs"),
    "sparsifier": ("SparseModel",),
    "spon": (
        "SponResult",
        "SponStep",
        "fit_spon",
        "interpolate_alpha",
        "load_alpha",
        "save_alpha",
        "spon_steps",
        "tail_inputs",
        "tail_model",
    ),
    "allocation": ("greedy_allocation", "greedy_path", "read_allocation"),
    "metrics": (
        "Eval",
        "always_on_fraction",
        "evaluate",
        "gap_closed",
        "kl_divergence",
        "layer_error",
        "linear_cka",
        "log_probs",
        "paired",
    ),
    "choice": ("McqResult", "mcq_accuracy"),
    "theory": ("energy_lost", "threshold"),
    "sweep": ("Sweep", "next_token_sweep"),
    "kernels": ("sparse_gemv",),
    "decoding": ("Decode", "decode"),
    "experiment": ("Workbench", "open_workbench"),
}

__getattr__, __dir__, __all__ = public(__name__, _HOME)
