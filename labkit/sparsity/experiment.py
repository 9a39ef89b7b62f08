"""The lab's tables and curves: SPON beside its baselines on the same windows, thresholds and model.

`build` does what takes long once (thresholds, greedy paths, training) and leaves small files in `data/`. `reproduce` loads
them and measures every method in one run. Both keep each finished part, so that an interrupted run goes on where it stopped.
"""

import contextlib
import functools
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit import assets, corpora
from labkit.llm import load_lm
from labkit.parts import claim, once, write_table
from labkit.report import Reproduction, Verdict
from labkit.sparsity.allocation import greedy_path, read_allocation
from labkit.sparsity.calibration import Calibration, calibrate
from labkit.sparsity.choice import mcq_accuracy
from labkit.sparsity.metrics import Eval, evaluate, log_probs
from labkit.sparsity.sites import Site, find_sites
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.spon import fit_spon, load_alpha, save_alpha

DATA = Path(__file__).with_name("data")
LEVELS = (0.3, 0.5, 0.6, 0.7)
TASKS = ("social_iqa", "winowhy", "strategyqa")


@dataclass(frozen=True)
class Recipe:
    """Sizes of a build. Everything in `data/` follows from these, the model and the corpora."""

    model: str = "smollm2"
    window: int = 128  # tokens
    dense_prefix: float = 0.01
    calibration_windows: int = 24
    greedy_windows: int = 2
    training_windows: int = 128
    ablation_windows: int = 32
    windows_per_step: int = 2
    lr: float = 5e-3
    runs: tuple[str, ...] = (
        *(f"spon-{p:g}-{seed}" for p in (0.5, 0.6) for seed in range(3)),
        "spon-0.3-0",
        "spon-0.7-0",
        "greedy+spon-0.5-0",
        "greedy+spon-0.6-0",
        "wina+spon-0.6-0",
    )


@dataclass(frozen=True)
class Workbench:
    """The model with what the build found out about it; what every measurement starts from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    calib: Calibration
    paths: pd.DataFrame
    recipe: Recipe
    data: Path

    def windows(self, domain: str, split: str, count: int, seed: int | None = None) -> torch.Tensor:
        """Windows of token ids (count, T) of a corpus."""
        return corpora.windows(self.tokenizer, corpora.documents(domain, split), self.recipe.window, count, seed=seed)

    def alpha(self, run: str) -> dict[Site, torch.Tensor]:
        """Spontaneous neurons of one of the recipe's runs, such as "spon-0.6-0"."""
        path = self.data / f"alpha-{run}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"run={run!r} has not been trained: labkit build 01 trains {', '.join(self.recipe.runs)}")
        return load_alpha(path, self.model)

    def sparse(self, method: str, p: float, seed: int = 0, **options) -> SparseModel:
        """Wrap the model by one method of the comparison at sparsity p; see `METHODS`."""
        if method not in METHODS:
            raise ValueError(f"method={method!r}: expected one of {sorted(METHODS)}")
        base = method.removesuffix("+spon").replace("spon", "teal").replace("mean-residual", "teal")
        score = {"teal": "magnitude", "greedy": "magnitude"}.get(base, base)
        sparsity = read_allocation(self.model, self.paths, p) if base == "greedy" else p
        options = {"dense_prefix": self.recipe.dense_prefix, "seed": seed} | options
        alpha = None
        if method == "mean-residual":
            alpha = {site: self.calib.mean_residual(site, p).to(site.weight) for site in find_sites(self.model)}
        elif method.endswith("spon"):
            alpha = self.alpha(f"{method}-{p:g}-{seed}")
        sparse = SparseModel(self.model, self.calib, sparsity, score=score, **options)
        sparse.set_alpha(alpha)
        return sparse


METHODS = {
    "random": "random mask, the floor",
    "random-rescaled": "random mask, survivors divided by 1 - p",
    "teal": "magnitude thresholds, uniform p [TEAL]",
    "greedy": "magnitude thresholds, greedy p per projection [TEAL]",
    "wina": "magnitude times column norm [WINA]",
    "mean-residual": "TEAL with the closed-form constant E[x - S(x)] [ours]",
    "spon": "TEAL with spontaneous neurons [paper]",
    "greedy+spon": "greedy allocation with spontaneous neurons",
    "wina+spon": "WINA with spontaneous neurons",
}


def open_workbench(data: Path = DATA, model: PreTrainedModel | None = None, tokenizer=None) -> Workbench:
    """Load the built thresholds and paths with their model.

    Args:
        data: folder of a build.
        model, tokenizer: the recipe's model if it is already loaded.
    """
    recipe_file = Path(data) / "recipe.json"
    if not recipe_file.is_file():
        raise FileNotFoundError(f"{data} holds no build of lab 01: run  labkit build 01")
    stored = json.loads(recipe_file.read_text(encoding="utf-8"))["recipe"]
    recipe = Recipe(**{key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()})
    if model is None:
        model, tokenizer = load_lm(recipe.model)
    calib = Calibration.load(Path(data) / "calibration.safetensors")
    return Workbench(model, tokenizer, calib, pd.read_csv(Path(data) / "greedy.csv.gz"), recipe, Path(data))


def stored(name: str, data: Path = DATA) -> pd.DataFrame:
    """A table that `build` left: "quality", "answers", "drift", "protocol", "ablations" or "greedy".

    "speed" holds the rows of `python -m benchmarks 01 --json labkit/sparsity/data/speed.json`.
    """
    if name == "speed":
        return pd.read_json(data / "speed.json")
    return pd.read_csv(data / f"{name}.csv.gz", dtype={"dense_prefix": str})


def build(*, out: Path | None = None, fast: bool = False, recipe: Recipe | None = None) -> None:
    """Calibrate, allocate and train; write what `open_workbench` reads. Finished parts are kept and not done again.

    Args:
        out: folder of the build; None is the package's own `data/`.
        fast: a recipe of minutes instead of hours, to try the machinery; not for figures.
        recipe: sizes of one's own.

    Raises:
        ValueError: `out` holds a build with another recipe.
    """
    out = DATA if out is None else Path(out)
    recipe = recipe or (_FAST_RECIPE if fast else Recipe())
    claim(out, recipe, packages=("torch", "transformers"))
    model, tokenizer = load_lm(recipe.model)
    blank = Workbench(model, tokenizer, None, None, recipe, out)
    stages = tqdm(total=4 + len(recipe.runs), desc="build 01", unit="part")

    once(out / "calibration.safetensors", lambda path: _calibrate(blank).save(path))
    calib = Calibration.load(out / "calibration.safetensors")
    stages.update()
    once(out / "greedy.csv.gz", lambda path: _greedy(blank, calib, out / "parts").pipe(write_table, path))
    stages.update()
    bench = open_workbench(out, model, tokenizer)
    for run in recipe.runs:
        once(out / f"alpha-{run}.safetensors", lambda path, run=run: _train(bench, run, path))
        stages.update()
    once(out / "ablations.csv.gz", lambda path: _ablations(bench, out / "parts").pipe(write_table, path))
    stages.update()
    if not all((out / f"{name}.csv.gz").is_file() for name in _MEASURED):
        for name, table in _measure(bench, _QUICK if fast else _FULL, None, out / "parts").items():
            once(out / f"{name}.csv.gz", functools.partial(write_table, table))
    stages.update()
    stages.close()
    shutil.rmtree(out / "parts", ignore_errors=True)


_FAST_RECIPE = Recipe(
    calibration_windows=4,
    greedy_windows=1,
    training_windows=4,
    ablation_windows=2,
    runs=("spon-0.5-0", "spon-0.6-0", "greedy+spon-0.6-0"),
)


def _calibrate(bench: Workbench) -> Calibration:
    ids = bench.windows("wiki", "train", bench.recipe.calibration_windows)
    return calibrate(bench.model, ids, wina=True, levels=LEVELS)


def _greedy(bench: Workbench, calib: Calibration, parts: Path) -> pd.DataFrame:
    ids = bench.windows("wiki", "train", bench.recipe.greedy_windows, seed=1)
    frames = []
    for layer in tqdm(range(1 + max(s.layer for s in find_sites(bench.model))), desc="greedy", unit="block"):
        part = parts / f"greedy-{layer:02d}.csv"
        once(part, lambda path, layer=layer: greedy_path(bench.model, calib, ids, layer).to_csv(path, index=False))
        frames.append(pd.read_csv(part))
    return pd.concat(frames).round(6)


def _train(bench: Workbench, run: str, path: Path) -> None:
    method, p, seed = run.rsplit("-", 2)
    ids = bench.windows("wiki", "train", bench.recipe.training_windows, seed=100 + int(seed))
    batches = ids.split(bench.recipe.windows_per_step)
    with bench.sparse(method.replace("+spon", "").replace("spon", "teal"), float(p)) as sparse:
        result = fit_spon(sparse, batches, steps=len(batches), lr=bench.recipe.lr, seed=int(seed), progress=True)
    trace = json.dumps([round(loss, 4) for loss in result.loss_trace])
    save_alpha(path, result.alpha, {"run": run, "training_tokens": str(ids.numel()), "loss_trace": trace})


def _ablations(bench: Workbench, parts: Path) -> pd.DataFrame:
    """Train variants of SPON at p = 0.6 on equal tokens and score each on the same test windows."""
    depth = 1 + max(site.layer for site in find_sites(bench.model))
    full = bench.recipe.ablation_windows
    variants = {
        "reference": {},
        "sites: o": {"sites": "o"},
        "sites: down": {"sites": "down"},
        "sites: o + down": {"sites": "o+down"},
        "layers: first half": {"layers": range(depth // 2)},
        "layers: last half": {"layers": range(depth // 2, depth)},
        "start: mean residual": {"init": "mean"},
        "free output bias": {"output_bias": True},
        "loss: reverse KL": {"loss": "reverse-kl"},
        "loss: hidden state": {"loss": "hidden-mse"},
        "trained on news": {"domain": "news"},
        "tokens: a quarter": {"windows": max(1, full // 4)},
        "tokens: a half": {"windows": max(1, full // 2)},
    }
    ids = bench.windows("wiki", "test", max(2, full // 4))
    teacher = log_probs(bench.model, ids)
    frames = [_scored(evaluate(bench.model, ids), variant="dense")]
    with bench.sparse("teal", 0.6) as sparse:
        frames.append(_scored(evaluate(sparse, ids, teacher=teacher), variant="TEAL"))
    for index, (variant, options) in enumerate(tqdm(variants.items(), desc="ablations", unit="fit")):
        part = parts / f"ablation-{index:02d}.csv"
        once(part, lambda path, v=variant, o=options: _ablate(bench, v, ids, teacher, **o).to_csv(path, index=False))
        frames.append(pd.read_csv(part))
    return pd.concat(frames).round(5)


def _ablate(
    bench: Workbench,
    variant: str,
    ids: torch.Tensor,
    teacher: torch.Tensor,
    *,
    domain: str = "wiki",
    windows: int | None = None,
    **options,
) -> pd.DataFrame:
    count = windows or bench.recipe.ablation_windows
    batches = bench.windows(domain, "train", count, seed=100).split(bench.recipe.windows_per_step)
    with bench.sparse("teal", 0.6) as sparse:
        result = fit_spon(sparse, batches, steps=len(batches), lr=bench.recipe.lr, progress=True, **options)
        scored = evaluate(sparse, ids, teacher=teacher)
    parameters = sum(vector.numel() for vector in result.alpha.values())
    return _scored(scored, variant=variant, parameters=parameters, training_tokens=count * bench.recipe.window)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a reproduction."""

    windows: int
    drift_windows: int
    items: int
    levels: tuple[float, ...]
    tasks: tuple[str, ...]


_FULL = _Sizes(windows=64, drift_windows=16, items=300, levels=LEVELS, tasks=TASKS)
_QUICK = _Sizes(windows=4, drift_windows=2, items=8, levels=(0.6,), tasks=TASKS[:1])


def reproduce(*, fast: bool = False, seeds: int | None = None, out: Path, data: Path = DATA) -> Reproduction:
    """Measure every method on held-out windows, another corpus and multiple-choice tasks, in one run.

    Args:
        fast: a few windows and one sparsity, to see that it runs; not for figures.
        seeds: training seeds of SPON to use; None takes all that were built.
        out: folder whose `parts/` keeps each finished measurement; a second call goes on from there.
        data: folder of the build to measure.
    """
    sizes = _QUICK if fast else _FULL
    bench = open_workbench(data)
    measured = _measure(bench, sizes, seeds, Path(out) / ("parts-fast" if fast else "parts"))
    observations, answers = measured["quality"], measured["answers"]
    tables = {
        "quality": summarise(observations),
        "differences": differences(observations),
        "accuracy": summarise_accuracy(answers),
        "drift": measured["drift"],
        "protocol": measured["protocol"],
        "observations": observations,
        "answers": answers,
    }
    notes = [
        f"Model {bench.recipe.model}, {sizes.windows} held-out windows of {bench.recipe.window} tokens, "
        f"dense_prefix={bench.recipe.dense_prefix:g} of each window; "
        f"{bench.recipe.training_windows * bench.recipe.window:,} training tokens per SPON run.",
        "± is the standard error over windows or items; differences are paired.",
    ]
    if "news" not in set(observations["domain"]):
        notes.append("The other corpus is missing: labkit assets fetch news")
    if (bench.data / "ablations.csv.gz").is_file():
        tables["ablations"] = summarise_ablations(pd.read_csv(bench.data / "ablations.csv.gz"))
        notes.append("The ablations were measured by `labkit build 01`, on the tokens named there and fewer windows.")
    return Reproduction(tables, _verdicts(observations, answers, measured["drift"]), notes)


_MEASURED = ("quality", "answers", "drift", "protocol")


def _measure(bench: Workbench, sizes: _Sizes, seeds: int | None, parts: Path) -> dict[str, pd.DataFrame]:
    """Every measurement of a reproduction, as tidy tables; what `parts` holds already is not measured again."""
    cells = _cells(bench, sizes.levels, seeds)
    quality = [_quality(bench, "wiki", cells, sizes.windows, parts)]
    core = [cell for cell in cells if cell[0] in ("teal", "spon") and cell[1] in (0.5, 0.6) and cell[2] == 0]
    with contextlib.suppress(assets.MissingAsset):  # the news corpus is optional
        quality.append(_quality(bench, "news", core, sizes.windows, parts))
    return {
        "quality": pd.concat(quality),
        "answers": _answers(bench, sizes, parts),
        "drift": _drift(bench, sizes, parts),
        "protocol": _protocol(bench, sizes, parts),
    }


def summarise(observations: pd.DataFrame) -> pd.DataFrame:
    """One row per corpus, method and sparsity: perplexity, distance to the dense model, share of TEAL's gap closed.

    Seeds are averaged window by window before the standard error over windows is taken; `gap_seed_sd` is the spread of the
    gap closed between training seeds.
    """
    rows = []
    for (domain, method, p), cell in observations.groupby(["domain", "method", "p"], sort=False):
        dense = _per_window(observations, domain, "dense", 0.0)
        mean = _per_window(observations, domain, method, p)
        row = {"domain": domain, "method": method, "p": p, "seeds": cell["seed"].nunique()}
        row["perplexity"] = math.exp(mean["nll"].mean())
        row["extra_nll"], row["extra_nll_stderr"] = _mean_stderr(mean["nll"] - dense["nll"])
        row["kl"], row["kl_stderr"] = _mean_stderr(mean["kl"])
        row["agreement"], row["agreement_stderr"] = _mean_stderr(mean["agree"])
        if method != "dense":
            teal = _per_window(observations, domain, "teal", p)
            row["gap_closed"], row["gap_closed_stderr"] = _gap(dense["nll"], teal["nll"], mean["nll"])
            gaps = [_gap(dense["nll"], teal["nll"], one.set_index("window")["nll"])[0] for _, one in cell.groupby("seed")]
            row["gap_seed_sd"] = float(pd.Series(gaps).std()) if len(gaps) > 1 else math.nan
        rows.append(row)
    return pd.DataFrame(rows)


def differences(observations: pd.DataFrame) -> pd.DataFrame:
    """Paired differences in nats per token, first method minus second (negative: the first is better), seeds averaged."""
    rows = []
    measured = set(zip(observations["domain"], observations["method"], observations["p"], strict=True))
    pairs = [("spon", "teal"), ("mean-residual", "teal"), ("greedy", "teal"), ("wina", "teal"), ("random", "teal")]
    pairs += [("greedy+spon", "greedy"), ("greedy+spon", "spon"), ("wina+spon", "wina"), ("wina+spon", "spon")]
    for domain in observations["domain"].unique():
        for p in sorted(observations["p"].unique()):
            for first, second in pairs:
                if {(domain, first, p), (domain, second, p)} <= measured:
                    a, b = (_per_window(observations, domain, method, p) for method in (first, second))
                    row = {"domain": domain, "p": p, "first": first, "second": second}
                    row["nll"], row["nll_stderr"] = _mean_stderr(a["nll"] - b["nll"])
                    row["kl"], row["kl_stderr"] = _mean_stderr(a["kl"] - b["kl"])
                    rows.append(row)
    return pd.DataFrame(rows)


def summarise_accuracy(answers: pd.DataFrame) -> pd.DataFrame:
    """Accuracy per task and model with its paired difference to the dense model, summed and length-normalised scores."""
    rows = []
    for (task, method, p), cell in answers.groupby(["task", "method", "p"], sort=False):
        dense = answers[(answers["task"] == task) & (answers["method"] == "dense")].set_index("item")
        cell = cell.set_index("item")
        row = {"task": task, "method": method, "p": p, "items": len(cell), "chance": cell["chance"].iloc[0]}
        row["accuracy"], row["accuracy_stderr"] = _mean_stderr(cell["correct"])
        row["normalised"], row["normalised_stderr"] = _mean_stderr(cell["correct_normalised"])
        row["minus_dense"], row["minus_dense_stderr"] = _mean_stderr(cell["correct"] - dense["correct"])
        rows.append(row)
    return pd.DataFrame(rows)


def summarise_ablations(ablations: pd.DataFrame) -> pd.DataFrame:
    """Gap closed per variant, and its paired difference to the reference in nats (positive: the variant is worse)."""
    by_window = {variant: cell.set_index("window") for variant, cell in ablations.groupby("variant", sort=False)}
    rows = []
    for variant, cell in by_window.items():
        row = {"variant": variant} | {column: cell[column].iloc[0] for column in ("parameters", "training_tokens")}
        row["gap_closed"], row["gap_closed_stderr"] = _gap(by_window["dense"]["nll"], by_window["TEAL"]["nll"], cell["nll"])
        row["nll_minus_reference"], row["nll_minus_reference_stderr"] = _mean_stderr(
            cell["nll"] - by_window["reference"]["nll"]
        )
        rows.append(row)
    table = pd.DataFrame([row for row in rows if row["variant"] not in ("dense", "TEAL")])
    return table.astype({"parameters": int, "training_tokens": int})


def _cells(bench: Workbench, levels: Iterable[float], seeds: int | None) -> list[tuple[str, float, int]]:
    """(method, p, seed) of every measurement: the training-free methods, and SPON wherever it was trained."""
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: expected at least 1")
    free = [method for method in METHODS if not method.endswith("spon")]
    cells = [(m, p, 0) for p in levels for m in free if m != "random-rescaled" or p in (0.5, 0.6)]
    for run in bench.recipe.runs:
        method, p, seed = run.rsplit("-", 2)
        if float(p) in levels and (seeds is None or int(seed) < seeds):
            cells.append((method, float(p), int(seed)))
    return cells


def _quality(bench: Workbench, domain: str, cells: list[tuple[str, float, int]], count: int, parts: Path) -> pd.DataFrame:
    ids = bench.windows(domain, "test", count)
    files = [(cell, parts / f"{domain}-{cell[0]}-{cell[1]:g}-{cell[2]}.csv") for cell in [("dense", 0.0, 0), *cells]]
    if not all(file.is_file() for _, file in files):
        teacher = log_probs(bench.model, ids, progress=True)
    for (method, p, seed), file in tqdm(files, desc=f"quality, {domain}", unit="model"):

        def measure(path: Path, method: str = method, p: float = p, seed: int = seed) -> None:
            labels = {"domain": domain, "method": method, "p": p, "seed": seed}
            if method == "dense":
                scored = evaluate(bench.model, ids)
            else:
                with bench.sparse(method, p, seed) as sparse:
                    scored = evaluate(sparse, ids, teacher=teacher)
            _scored(scored, **labels).to_csv(path, index=False)

        once(file, measure)
    return pd.concat([pd.read_csv(file) for _, file in files]).round(5)


def _answers(bench: Workbench, sizes: _Sizes, parts: Path) -> pd.DataFrame:
    cells = [("dense", 0.0)] + [(m, p) for p in (0.5, 0.6) if p in sizes.levels for m in ("teal", "spon")]
    frames = []
    for task in sizes.tasks:
        for method, p in cells:

            def answer(path: Path, task: str = task, method: str = method, p: float = p) -> None:
                file = assets.path("bigbench") / task / "task.json"
                if method == "dense":
                    result = mcq_accuracy(bench.model, bench.tokenizer, file, sizes.items, progress=True)
                else:
                    with bench.sparse(method, p) as sparse:
                        result = mcq_accuracy(sparse, bench.tokenizer, file, sizes.items, progress=True)
                columns = {"correct": result.correct.int(), "correct_normalised": result.correct_normalised.int()}
                table = pd.DataFrame(columns).rename_axis("item").reset_index()
                table.assign(task=task, method=method, p=p, chance=result.chance).to_csv(path, index=False)

            part = parts / f"{task}-{method}-{p:g}.csv"
            once(part, answer)
            frames.append(pd.read_csv(part))
    return pd.concat(frames)


def _drift(bench: Workbench, sizes: _Sizes, parts: Path) -> pd.DataFrame:
    """Residual-stream drift per layer under TEAL and SPON, on held-out wiki windows."""
    ids = bench.windows("wiki", "test", sizes.drift_windows)
    frames = []
    for method in ("teal", "spon"):
        for p in (0.5, 0.6):
            if p not in sizes.levels:
                continue

            def measure(path: Path, method: str = method, p: float = p) -> None:
                with bench.sparse(method, p) as sparse:
                    drift = evaluate(sparse, ids, hidden=True).drift
                drift.assign(method=method, p=p).round(5).to_csv(path, index=False)

            part = parts / f"drift-{method}-{p:g}.csv"
            once(part, measure)
            frames.append(pd.read_csv(part))
    return pd.concat(frames, ignore_index=True)


def _protocol(bench: Workbench, sizes: _Sizes, parts: Path) -> pd.DataFrame:
    """What the choice of tokens that stay dense does to the numbers, TEAL and SPON at p = 0.6."""
    ids = bench.windows("wiki", "test", sizes.drift_windows)

    def measure(path: Path) -> None:
        teacher, rows = log_probs(bench.model, ids), []
        dense = evaluate(bench.model, ids)
        for dense_prefix in (0, 1, 0.01, 0.5):
            scores = {}
            for method in ("teal", "spon"):
                with bench.sparse(method, 0.6, dense_prefix=dense_prefix) as sparse:
                    scores[method] = evaluate(sparse, ids, teacher=teacher)
            row = {"dense_prefix": str(dense_prefix), "perplexity_dense": dense.perplexity}
            row |= {f"perplexity_{method}": scored.perplexity for method, scored in scores.items()}
            nll = {method: pd.Series(scored.nll.numpy()) for method, scored in (scores | {"dense": dense}).items()}
            row["gap_closed"], row["gap_closed_stderr"] = _gap(nll["dense"], nll["teal"], nll["spon"])
            rows.append(row)
        pd.DataFrame(rows).to_csv(path, index=False)

    part = parts / "protocol.csv"
    once(part, measure)
    return pd.read_csv(part, dtype={"dense_prefix": str})


def _verdicts(observations: pd.DataFrame, answers: pd.DataFrame, drift: pd.DataFrame) -> list[Verdict]:
    table = summarise(observations).set_index(["domain", "method", "p"])
    pairs = differences(observations).set_index(["domain", "p", "first", "second"])
    verdicts = []

    def gap(domain: str, p: float, target: float, sigmas: float) -> None:
        if (domain, "spon", p) in table.index:
            row, pair = table.loc[(domain, "spon", p)], pairs.loc[(domain, p, "spon", "teal")]
            holds = row["gap_closed"] >= target and -pair["nll"] > sigmas * pair["nll_stderr"]
            claim = f"share of TEAL's NLL gap that SPON closes at {p:.0%} on {domain}"
            wanted = f"≥ {target:g}, difference > {sigmas:g} s.e."
            verdicts.append(Verdict(claim, row["gap_closed"], row["gap_closed_stderr"], wanted, bool(holds), "ours"))

    gap("wiki", 0.5, 0.25, 5)
    gap("wiki", 0.6, 0.5, 5)
    gap("news", 0.5, 0.0, 2)
    gap("news", 0.6, 0.3, 3)
    for p, target in ((0.5, 0.15), (0.6, 0.42)):
        if ("wiki", "spon", p) in table.index:
            fall = 1 - table.loc[("wiki", "spon", p), "kl"] / table.loc[("wiki", "teal", p), "kl"]
            claim = f"relative fall of KL(dense || sparse) from TEAL to SPON at {p:.0%} on wiki"
            verdicts.append(Verdict(claim, float(fall), None, f"≥ {target:g}", bool(fall >= target), "ours"))
    for (domain, p, first, second), pair in pairs.iterrows():
        if domain == "wiki" and (first, second) in (("greedy+spon", "greedy"), ("greedy+spon", "spon"), ("wina+spon", "wina")):
            claim = f"NLL of {first} minus {second} at {p:.0%}, nats per token"
            holds = -pair["nll"] > 2 * pair["nll_stderr"]
            source = "paper" if first == "wina+spon" else "ours"
            verdicts.append(Verdict(claim, pair["nll"], pair["nll_stderr"], "< 0 by > 2 s.e.", bool(holds), source))
    keys = {p: ("wiki", p, "spon", "teal") for p in LEVELS[:3]}
    gains = {p: -pairs.loc[key, "nll"] for p, key in keys.items() if key in pairs.index}
    if len(gains) == 3:
        rises = min(gains[0.5] - gains[0.3], gains[0.6] - gains[0.5])
        claim = "SPON's gain over TEAL grows from 30 to 50 to 60 %: smaller of the two rises, nats per token"
        verdicts.append(Verdict(claim, rises, None, "> 0", bool(rises > 0), "paper"))
    for metric, better in (("cosine", 1), ("relative_l2", -1)):
        for p in sorted(drift["p"].unique()):
            wide = drift[drift["p"] == p].pivot(index="layer", columns="method", values=metric)
            share = float((better * (wide["spon"] - wide["teal"]) > 0).mean())
            claim = f"share of layers whose drift ({metric}) falls under SPON at {p:.0%}"
            verdicts.append(Verdict(claim, share, None, "≥ 0.8", share >= 0.8, "paper"))
    for p in (0.5, 0.6):
        wide = answers[answers["p"] == p].pivot(index=["task", "item"], columns="method", values="correct")
        if len(wide):
            value, stderr = _mean_stderr(wide["spon"] - wide["teal"])
            claim = f"accuracy of SPON minus TEAL at {p:.0%}, {len(wide)} multiple-choice items"
            verdicts.append(Verdict(claim, value, stderr, "> 0 by > 2 s.e.", bool(value > 2 * stderr), "paper"))
    return verdicts


def _scored(scored: Eval, **labels) -> pd.DataFrame:
    """One row per window."""
    columns = {"nll": scored.nll, "kl": scored.kl, "agree": scored.agree}
    table = pd.DataFrame({name: value.numpy() for name, value in columns.items()})
    return table.rename_axis("window").reset_index().assign(**labels)


def _per_window(observations: pd.DataFrame, domain: str, method: str, p: float) -> pd.DataFrame:
    chosen = (observations["domain"] == domain) & (observations["method"] == method) & (observations["p"] == p)
    return observations[chosen].groupby("window")[["nll", "kl", "agree"]].mean()


def _mean_stderr(values: pd.Series) -> tuple[float, float]:
    return float(values.mean()), float(values.sem())


def _gap(dense: pd.Series, teal: pd.Series, method: pd.Series) -> tuple[float, float]:
    """Share of TEAL's extra NLL that a method removes, with its jackknife standard error over windows."""
    removed, extra, n = teal - method, teal - dense, len(teal)
    left_out = (removed.sum() - removed) / (extra.sum() - extra)
    stderr = math.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    return float(removed.sum() / extra.sum()), stderr
