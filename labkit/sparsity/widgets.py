"""Live panels of the sparsity lab. Each takes the `Workbench` and opens on something worth looking at."""

import contextlib
import functools
import html
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch

from labkit import labs, theme
from labkit.panel import Panel, Progress
from labkit.sparsity import figures, theory
from labkit.sparsity.calibration import calibrate
from labkit.sparsity.experiment import LEVELS, Workbench
from labkit.sparsity.metrics import always_on_fraction, kl_divergence, layer_error, token_kl
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel
from labkit.sparsity.spon import interpolate_alpha, spon_steps, tail_inputs, tail_model
from labkit.sparsity.sweep import next_token_sweep

PROMPT = "The first person to walk on the Moon was Neil"
SLIDER_LEVELS = tuple(round(0.05 * i, 2) for i in range(19))

_model_in_use = threading.RLock()  # hooks on the shared model: one panel at a time


def _slider(description: str, value: float = 0.5, high: float = 0.9, step: float = 0.05) -> widgets.FloatSlider:
    return widgets.FloatSlider(value=value, min=0, max=high, step=step, description=description, readout_format=".0%")


def _level_slider(levels: tuple[float, ...], value: float) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=[(theme.percent(p), p) for p in levels], value=value, description="Sparsity p")


def _prompt_box(prompt: str) -> widgets.Textarea:
    return widgets.Textarea(value=prompt, description="Prompt (read when you leave the box)", continuous_update=False, rows=3)


def sparsity(bench: Workbench, prompt: str = PROMPT) -> Panel:
    """Next-token bars for a prompt you type: dense beside sparse beside SPON, at any sparsity.

    A new prompt is read once, for all positions of the slider together; moving the slider only redraws.
    """
    trained = {p: bench.alpha(f"spon-{p:g}-0") for p in LEVELS}
    tokenizer = bench.tokenizer

    def compute(prompt: str):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if ids.shape[1] < 2:
            raise ValueError("prompt: type at least two words, the model continues from the last one")
        ids = ids[:, -64:]  # the cache is repeated for every position of the slider
        with _model_in_use:
            neurons_at = functools.partial(interpolate_alpha, trained)
            return next_token_sweep(bench.model, bench.calib, ids, SLIDER_LEVELS, neurons_at)

    def draw(figure, sweep, sparsity):
        level = int(np.argmin(np.abs(np.array(sweep.levels) - sparsity)))
        rows = {"dense": sweep.dense, "teal": sweep.teal[level], "spon": sweep.spon[level]}
        top = sweep.dense.topk(10).indices
        labels = [_visible(tokenizer.decode([i])) for i in top.tolist()]
        for trace, method in zip(figure.data, ("spon", "teal", "dense"), strict=True):
            trace.y, trace.x = labels, rows[method][top].exp().numpy().round(4)
        kl = {method: float(kl_divergence(sweep.dense, rows[method])) for method in ("teal", "spon")}
        says = {m: _visible(tokenizer.decode([int(row.argmax())])) for m, row in rows.items()}
        return (
            f"{theme.percent(sparsity)} sparse: dense says <b>{html.escape(says['dense'])}</b>, TEAL "
            f"<b>{html.escape(says['teal'])}</b>, SPON <b>{html.escape(says['spon'])}</b>. "
            f"KL to dense {theme.fmt(kl['teal'])} nats → {theme.fmt(kl['spon'])} with SPON."
        )

    return Panel(
        "sparsity",
        figure=figures.next_token_bars(),
        compute=compute,
        draw=draw,
        controls={"prompt": _prompt_box(prompt)},
        view={"sparsity": _slider("Sparsity p")},
        caption="The ten tokens are the dense model's favourites. Look for the sparsity at which its first choice loses the "
        "lead, with and without spontaneous neurons.",
    )


def continuations(bench: Workbench, prompt: str = "Water boils at a temperature of 100 degrees", tokens: int = 12) -> Panel:
    """What the dense, the sparse and the SPON model write after a prompt, token by token, the most likely one each time."""

    def compute(prompt: str, sparsity: float, tokens: int) -> Iterator[Progress]:
        ids = bench.tokenizer(prompt, return_tensors="pt")["input_ids"][:, -200:]
        if ids.shape[1] < 2:
            raise ValueError("prompt: type at least two words, the model continues from the last one")
        texts = {"dense": "", "teal": "", "spon": ""}
        done = 0
        for method in texts:
            written: list[int] = []
            for token in _greedy_tokens(bench, method, sparsity, ids, tokens):
                written.append(token)
                texts[method] = bench.tokenizer.decode(written)
                done += 1
                yield Progress(done, 3 * tokens, (prompt, sparsity, dict(texts)))

    def draw(box, result) -> str:
        prompt, sparsity, texts = result
        rows = []
        for method, text in texts.items():
            edge = f"border-left:6px solid {theme.ROLE[figures.ROLES[method]].colour};padding:4px 12px;white-space:nowrap"
            words = f"<span style='color:#777'>{html.escape(prompt)}</span><b>{html.escape(text)}</b>"
            rows.append(f"<tr><td style='{edge}'>{figures.NAMES[method]}</td><td style='padding:4px'>{words}</td></tr>")
        box.value = f"<table style='line-height:1.5'>{''.join(rows)}</table>"
        same = {m: texts[m] == texts["dense"] for m in ("teal", "spon")}
        words = {True: "the dense model's words", False: "other words"}
        return f"{theme.percent(sparsity)} sparse: TEAL writes {words[same['teal']]}, SPON {words[same['spon']]}."

    return Panel(
        "continuations",
        figure=widgets.HTML(layout={"height": "180px"}),
        compute=compute,
        draw=draw,
        controls={
            "prompt": _prompt_box(prompt),
            "sparsity": _level_slider(LEVELS, 0.6),
            "tokens": widgets.IntSlider(value=tokens, min=4, max=40, description="Tokens to write"),
        },
        caption="The prompt is read densely; every token written after it is sparse.",
        start="Write",
    )


def layer(bench: Workbench, recorded: Mapping[tuple[int, str], torch.Tensor]) -> Panel:
    """One layer's activations with their threshold, and what masking them costs at the layer's output.

    Args:
        recorded: activations from `site_inputs`, (tokens, d) each.
    """
    sites = {(site.layer, site.name): site for site in find_sites(bench.model)}
    depth = 1 + max(layer for layer, _ in sites)
    edges = np.linspace(-4, 4, 81)
    centres = (edges[1:] + edges[:-1]) / 2
    levels = np.arange(0, 0.95, 0.1)

    def compute(block: int, projection: str):
        site = sites[(block, projection)]
        x = recorded[site.group].float()
        scores = ("magnitude", "wina", "random")
        errors = {score: [layer_error(site.weight, x[:128], float(p), score) for p in levels] for score in scores}
        return x / x.std(), errors

    def draw(figure, result, score, sparsity):
        x, errors = result
        density, _ = np.histogram(x.numpy(), edges, density=True)
        tau = float(x.abs().flatten().kthvalue(max(1, int(np.ceil(sparsity * x.numel())))).values) if sparsity else 0.0
        lost = float(x[x.abs() <= tau].square().sum() / x.square().sum()) if sparsity else 0.0
        data = figure.data
        data[0].x, data[0].y = centres, density.round(4)
        for trace, curve in zip(data[1:3], figures.density_curves(centres), strict=True):
            trace.x, trace.y = centres, curve.round(4)
        data[3].x, data[3].y = [-tau, -tau, None, tau, tau], [0, 1.6, None, 0, 1.6]
        for trace, name in zip(data[4:7], errors, strict=True):
            trace.x, trace.y = levels.round(2), np.round(errors[name], 4)
            trace.line.width = 3 if name == score else 1
        fine = np.linspace(0, 0.95, 60)
        data[7].x, data[7].y = fine, np.sqrt(theory.energy_lost(fine)).round(4)
        data[8].x, data[8].y = fine, np.sqrt(fine).round(4)
        error = float(np.interp(sparsity, levels, errors[score]))
        data[9].x, data[9].y = [sparsity], [error]
        expected = {name: theme.percent(float(theory.energy_lost(sparsity, name)), 1) for name in ("gaussian", "laplace")}
        mask = {"magnitude": "TEAL", "wina": "WINA", "random": "a random mask"}[score]
        return (
            f"{theme.percent(sparsity)} of the entries lie below τ = {theme.fmt(tau)} standard deviations and hold "
            f"{theme.percent(lost, 1)} of the energy (Gaussian {expected['gaussian']}, Laplace {expected['laplace']}). "
            f"The output is off by {theme.percent(error, 1)} with {mask}."
        )

    names = list(dict.fromkeys(name for _, name in sites))
    scores_offered = [("TEAL: |x|", "magnitude"), ("WINA: |x| · ‖column‖", "wina"), ("random", "random")]
    return Panel(
        "layer",
        figure=figures.layer(),
        compute=compute,
        draw=draw,
        controls={
            "block": widgets.IntSlider(value=depth // 2, min=0, max=depth - 1, description="Block", continuous_update=False),
            "projection": widgets.Dropdown(options=names, value=names[-1], description="Projection"),
        },
        view={
            "score": widgets.Dropdown(options=scores_offered, description="Score"),
            "sparsity": _slider("Sparsity p", 0.6),
        },
        caption="Left: heavier tails than a Gaussian's mean that the small entries hold less. Right: the error at the output "
        "follows the square root of the energy lost, far below a random mask's √p.",
    )


def quality(table: pd.DataFrame) -> Panel:
    """The stored comparison as curves over sparsity, with a cursor.

    Args:
        table: from `experiment.summarise`.
    """
    table = table[table["domain"] == "wiki"]

    def draw(figure, _result, metric, sparsity):
        for index, method in enumerate(figures.CURVES):
            x, y, half = figures.quality_curve(table, method, metric)
            figure.data[2 * index].x, figure.data[2 * index].y = theme.outline(x, y - half, y + half)
            figure.data[2 * index + 1].x, figure.data[2 * index + 1].y = x, y
        figures.scale_quality(figure, table, metric)
        low, high = figure.layout.yaxis.range
        log = figure.layout.yaxis.type == "log"
        figure.data[-1].x, figure.data[-1].y = [sparsity] * 2, [10**low, 10**high] if log else [low, high]
        at = table[table["p"] == sparsity].set_index("method")
        dense = table[table["method"] == "dense"].iloc[0]
        gap, stderr = at.loc["spon", ["gap_closed", "gap_closed_stderr"]]
        return (
            f"{theme.percent(sparsity)} sparse: perplexity {theme.fmt(at.loc['teal', 'perplexity'])} → "
            f"{theme.fmt(at.loc['spon', 'perplexity'])} with SPON (dense {theme.fmt(dense['perplexity'])}); SPON closes "
            f"{theme.percent(gap)} ± {theme.percent(stderr)} of TEAL's gap."
        )

    return Panel(
        "quality",
        figure=figures.quality(table),
        compute=lambda: table,
        draw=draw,
        controls={},
        view={
            "metric": widgets.Dropdown(options=[(name, key) for key, name in figures.METRICS.items()], description="Metric"),
            "sparsity": _level_slider(LEVELS, 0.6),
        },
        caption="Look for the cliff: where does a step of ten points cost more than all before it? A random mask lies far "
        "above the chart.",
    )


def prefix(bench: Workbench, input_ids: torch.Tensor) -> Panel:
    """Which tokens are sparsified? KL to the dense model along a window, for four protocols.

    Args:
        input_ids: windows (B, T); a few, since every move runs them.
    """
    body, head = bench.model.base_model, bench.model.get_output_embeddings()
    with torch.inference_mode():
        dense = body(input_ids, use_cache=False).last_hidden_state.split(8, dim=1)

    def compute(protocol: float, sparsity: float):
        curves = {}
        for method in ("teal", "spon"):
            with _model_in_use, torch.inference_mode(), bench.sparse(method, sparsity, dense_prefix=protocol):
                hidden = body(input_ids, use_cache=False).last_hidden_state.split(8, dim=1)
                # the head reads a few positions at a time: all logits at once would take much of the kernel's memory
                kl = [token_kl(head(h), head(s)) for h, s in zip(dense, hidden, strict=True)]
            curves[method] = torch.cat(kl, dim=1).mean(0).numpy()  # (T,)
        length = input_ids.shape[1]
        edge = protocol if isinstance(protocol, int) else max(1, int(protocol * length))
        return curves, edge

    def draw(figure, result):
        curves, edge = result
        for trace, curve in zip(figure.data, curves.values(), strict=False):
            trace.x, trace.y = np.arange(len(curve)), pd.Series(curve).rolling(5, center=True, min_periods=1).mean().round(3)
        figure.data[2].x, figure.data[2].y = [edge, edge], [0, 3]
        mean = {method: float(curve.mean()) for method, curve in curves.items()}
        return (
            f"{edge} of {input_ids.shape[1]} tokens dense: mean KL {theme.fmt(mean['teal'])} nats with TEAL, "
            f"{theme.fmt(mean['spon'])} with SPON."
        )

    options = [("none", 0), ("first token", 1), ("first 1 % (WINA)", 0.01), ("first half (TEAL)", 0.5)]
    return Panel(
        "prefix",
        figure=figures.positions(input_ids.shape[1]),
        compute=compute,
        draw=draw,
        controls={
            "protocol": widgets.Dropdown(options=options, value=0.5, description="Tokens kept dense"),
            "sparsity": _level_slider((0.5, 0.6), 0.6),
        },
        caption="Look at the mean in the words below the figure: the protocol moves it more than the method does.",
    )


def anchors(recorded: Mapping[tuple[int, str], torch.Tensor], length: int = 128) -> Panel:
    """Channels of a site that stay on at every token so far, against the number of tokens.

    Args:
        recorded: activations from `site_inputs`, (tokens, d) each.
        length: tokens of the first window in them.
    """
    groups = {"attention input": "attn_in", "attention output": "attn_out", "MLP input": "mlp_in", "MLP middle": "mlp_mid"}
    depth = 1 + max(layer for layer, _ in recorded)

    def compute(block: int, site: str):
        x = recorded[(block, groups[site])][:length].float()
        taus = x.abs().flatten().sort().values
        return {p: always_on_fraction(x, float(taus[int(p * x.numel()) - 1])).numpy() for p in LEVELS}

    def draw(figure, curves):
        for trace, curve in zip(figure.data, curves.values(), strict=False):
            trace.x, trace.y = np.arange(1, length + 1), np.maximum(curve, 1e-9).round(5)
        at = min(16, length)
        shares = {p: float(curve[at - 1]) for p, curve in curves.items()}
        words = ", ".join(f"{theme.percent(share, 1)} at {theme.percent(p)} sparsity" for p, share in shares.items())
        return f"After {at} tokens the channels that never fell silent are {words}."

    return Panel(
        "anchors",
        figure=figures.always_on(length, LEVELS),
        compute=compute,
        draw=draw,
        controls={
            "block": widgets.IntSlider(value=min(10, depth - 1), min=0, max=depth - 1, description="Block"),
            "site": widgets.Dropdown(options=list(groups), description="Activation"),
        },
        caption="Dotted: (1 − p)^T, which independent channels would follow. Look for the plateau: a few channels are on at "
        "nearly every token, and higher sparsity silences them.",
    )


def train(bench: Workbench, input_ids: torch.Tensor, blocks: int = 4) -> Panel:
    """Train spontaneous neurons live in the last blocks, whose dense inputs are cached, and stop when you like.

    Args:
        input_ids: windows (B, T): the last four are held out, the rest are training batches of one window.
        blocks: how many blocks at the end of the model are sparsified and trained.
    """
    hidden = tail_inputs(bench.model, input_ids, blocks)
    tail = tail_model(bench.model, blocks)
    calib = calibrate(tail, hidden[:-4], levels=())

    def compute(sparsity: float, sites: str, rate: float, steps: int, seed: int) -> Iterator[Progress]:
        with SparseModel(tail, calib, sparsity) as sparse:
            start = float(evaluate_kl(sparse))
            held_out, losses = [(0, start)], []
            options = dict(steps=steps, lr=rate, sites=sites, seed=seed)
            for state in spon_steps(sparse, hidden[:-4].split(1), **options):
                losses.append(state.loss)
                if state.step % 5 == 0 or state.step == steps:
                    held_out.append((state.step, float(evaluate_kl(sparse))))
                yield Progress(state.step, steps, (steps, start, list(losses), list(held_out)))

    @torch.inference_mode()
    def evaluate_kl(sparse: SparseModel) -> torch.Tensor:
        means = []
        for state in hidden[-4:].split(1):
            student = sparse(inputs_embeds=state, use_cache=False).logits
            with sparse.dense() as dense:
                means.append(token_kl(dense(inputs_embeds=state, use_cache=False).logits, student).mean())
        return sum(means) / len(means)

    def draw(figure, result):
        steps, start, losses, held_out = result
        figure.layout.xaxis.range = (0, steps)
        figure.layout.yaxis.range = (0, 1.25 * max(start, max(losses)))
        figure.data[0].x, figure.data[0].y = np.arange(1, len(losses) + 1), np.round(losses, 4)
        figure.data[1].x, figure.data[1].y = zip(*held_out, strict=True)
        figure.data[2].x, figure.data[2].y = [0, steps], [start, start]
        now = held_out[-1][1]
        change = f"{theme.percent(abs(1 - now / start))} {'less' if now < start else 'more'}"
        return f"Step {len(losses)}: KL on held-out windows {theme.fmt(start)} → {theme.fmt(now)} nats ({change})."

    *_, first = compute(0.8, "all", 3e-3, 10, 0)
    return Panel(
        "train",
        figure=figures.training(),
        compute=compute,
        draw=draw,
        controls={
            "sparsity": _slider("Sparsity p", 0.8, step=0.1),
            "sites": widgets.Dropdown(options=["all", "o+down", "o", "down"], description="Sites"),
            "rate": widgets.SelectionSlider(
                options=[(f"{r:g}", r) for r in (1e-3, 3e-3, 1e-2, 3e-2)], value=3e-3, description="Learning rate"
            ),
            "steps": widgets.IntSlider(value=40, min=5, max=200, step=5, description="Steps"),
            "seed": widgets.IntSlider(value=0, min=0, max=9, description="Seed"),
        },
        caption=f"Only the last {blocks} blocks are sparse here, so a step takes a fraction of a second. Ten steps are shown "
        "until you press Train.",
        start="Train",
        initial=first.result,
    )


def neurons(bench: Workbench) -> Panel:
    """One spontaneous neuron or many? The same output, to rounding: K neurons per layer add up to one."""
    site = find_sites(bench.model, "down")[len(find_sites(bench.model, "down")) // 2]
    alpha = bench.alpha("spon-0.6-0")[site].double()
    weight = site.weight.double()

    def compute(count: int):
        parts = torch.randn(count, len(alpha), generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        parts = parts * alpha.std()
        parts = parts + (alpha - parts.sum(0)) / count  # K vectors that sum to alpha
        one, many = weight @ alpha, (weight @ parts.T).sum(1)
        return parts.norm(dim=1), float((one - many).abs().max() / one.abs().max())

    def draw(box, result) -> str:
        norms, difference = result
        rows = "".join(f"<tr><td>α<sub>{i}</sub></td><td>{theme.fmt(float(n))}</td></tr>" for i, n in enumerate(norms, 1))
        total = f"<tr style='border-top:1px solid'><td>their sum</td><td>{theme.fmt(float(alpha.norm()))}</td></tr>"
        box.value = f"<table><tr><th>neuron</th><th>norm</th></tr>{rows}{total}</table>"
        verdict = "identical to rounding" if difference < 1e-12 else "not identical"
        return f"K = {len(norms)}: the outputs are <b>{verdict}</b>."

    return Panel(
        "neurons",
        figure=widgets.HTML(layout={"height": "290px"}),
        compute=compute,
        draw=draw,
        controls={"count": widgets.IntSlider(value=4, min=1, max=8, description="Neurons per layer, K")},
        caption=f"Site {site}, in double precision: however many neurons there are, their sum is all that the layer sees.",
    )


def speed(rows: pd.DataFrame) -> Panel:
    """The decoding table of the benchmark, and a button that measures it on this machine in a process of its own.

    Args:
        rows: stored rows of `python -m benchmarks 01`.
    """
    repository = labs.notebook_dir().parent

    def compute() -> Iterator[Progress]:
        if not (repository / "benchmarks").is_dir():
            raise ValueError("the benchmarks come with labkit's repository, not with the installed package")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "benchmarks", "01", "--json", str(file)]
            child = subprocess.Popen(command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                while child.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(1)
                    measured = pd.read_json(file) if file.is_file() else rows[:0]
                    yield Progress(min(len(measured), len(rows)), len(rows), measured if len(measured) else None)
            finally:
                child.kill()
                child.wait()
            if child.returncode:
                raise RuntimeError("the benchmark failed: run  python -m benchmarks 01  in a terminal to see why")

    def draw(box, measured: pd.DataFrame) -> str:
        shown = measured[measured["target"].notna() & measured["name"].str.startswith("decode")]
        cells = [
            f"<tr><td>{html.escape(row.name_)}</td><td>{html.escape(row.peer)}</td><td style='text-align:right'>"
            f"{theme.fmt(row.ratio)}× ({theme.fmt(row.ratio_min)} to {theme.fmt(row.ratio_max)})</td>"
            f"<td style='text-align:right'>{row.target}</td></tr>"
            for row in shown.rename(columns={"name": "name_"}).itertuples()
        ]
        head = "<tr><th>build</th><th>against</th><th>ratio, median (extremes)</th><th>target</th></tr>"
        box.value = f"<table style='width:100%;line-height:1.6'>{head}{''.join(cells)}</table>"
        held = int(measured["holds"].eq(True).sum())
        return f"{len(measured)} ratios measured, {held} of {int(measured['target'].notna().sum())} targets hold."

    return Panel(
        "speed",
        figure=widgets.HTML(),
        compute=compute,
        draw=draw,
        controls={},
        caption="Ratios of processor time, builds taking turns at every token; stored rows until you run it here.",
        start="Measure here (minutes, 2.5 GB)",
        initial=rows,
    )


def _greedy_tokens(bench: Workbench, method: str, p: float, ids: torch.Tensor, count: int) -> Iterator[int]:
    """Most likely next tokens, one at a time, after a dense prefill."""
    with _model_in_use, torch.inference_mode():
        out = bench.model(input_ids=ids, use_cache=True)
    for _ in range(count):
        token = int(out.logits[0, -1].argmax())
        yield token
        with _model_in_use, torch.inference_mode():
            step = dict(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
            if method == "dense":
                out = bench.model(**step)
            else:
                with bench.sparse(method, p, dense_prefix=0) as sparse:
                    out = sparse(**step)


def _visible(token: str) -> str:
    """A token as text in which its spaces and line breaks can be seen."""
    return token.replace(" ", "␣").replace("\n", "⏎") or "∅"
