"""Does a watermark survive paraphrasing? Stability features against the plain z-test (lab 07, ICML 2026 poster 61064).

    Watermark → generate → paraphrase, round after round → green bits → scores, features → evaluate

`scheme` which tokens are green, `scores` z and WinMax of green bits, `theory` what both should be, `features` sliding windows
and the pattern stability score, `channel` paraphrasing as a synthetic channel of bits; then texts: `generate`, `paraphrase`,
`corpus`; then what is compared: `lineages`, `detectors`, `evaluation`, `experiment`, `figures` and `widgets`.
"""

from labkit.lazy import public

_HOME = {
    "scheme": ("GreenBits", "SynthID", "Watermark", "synthid_bits"),
    "scores": ("best_window", "fresh", "p_value", "winmax", "z_score", "z_unique"),
    "theory": (
        "expected_runs",
        "expected_z",
        "gaussian_auc",
        "green_rate_bound",
        "num_windows",
        "pss_null_level",
        "spike_entropy",
        "surviving_rate",
        "uniform_green_rate",
        "variance_z",
    ),
    "features": ("FEATURES", "Local", "compact_pss", "local_stats", "pss", "static_features", "windows"),
    "channel": ("copy_paste", "lineage", "redraw"),
    "contexts": ("Contexts", "build_contexts", "green_probability", "load_contexts", "next_token", "save_contexts"),
    "prose": ("Passage", "passages"),
    "generate": ("decode", "encode", "load", "load_tokenizer"),
    "paraphrase": (
        "LLMParaphraser",
        "MTWordNet",
        "MachineTranslation",
        "PARAPHRASERS",
        "Paraphraser",
        "Strong",
        "WordNet",
        "chain",
        "survival",
    ),
    "corpus": ("Corpus", "build_corpus", "load_corpus"),
    "lineages": ("Lineages", "Protocol", "prefix", "probe", "segments", "single", "suffix", "window_preset"),
    "detectors": ("DETECTORS", "Detector"),
    "evaluation": ("Difference", "FittedDetector", "Result", "auc", "difference", "evaluate", "fit", "folds", "transfer"),
}

__getattr__, __dir__, __all__ = public(__name__, _HOME)
