"""Live panels of lab 07. Each opens on something worth looking at; AUCs of classifiers come from the stored tables.

Sliders recompute bits, z, WinMax and windows only. Classifiers are fitted on a button.
"""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ipywidgets as widgets
import numpy as np
import pandas as pd
from scipy import stats
from sklearn.metrics import roc_curve

from labkit.panel import Panel, Playback
from labkit.theme import fmt, nice, percent
from labkit.watermark import experiment, figures, theory
from labkit.watermark.channel import lineage
from labkit.watermark.contexts import Contexts, green_probability, load_contexts, next_token
from labkit.watermark.corpus import WRONG_KEY
from labkit.watermark.evaluation import auc, fit
from labkit.watermark.features import FEATURES, local_stats, static_features, windows
from labkit.watermark.lineages import MIN_SPAN, segments, single, window_preset
from labkit.watermark.scheme import GreenBits, Watermark
from labkit.watermark.scores import best_window, p_value, winmax, z_of_counts, z_score, z_unique

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from labkit.watermark.corpus import Corpus
    from labkit.watermark.paraphrase import Paraphraser

GAMMA = 0.25
LENGTHS = (50, 100, 150, 200)
SEES = {
    "single": "one text: Dd",
    "prefix": "all so far: D1 … Dd (the paper)",
    "suffix": "the late ones: Dd … D8",
    "probe": "one text, and 3 rewrites of it",
}
"""Protocol → what the detector is given."""
ONE_TEXT = ("z", "z_unique", "winmax", "static+lr", "static+xgb")
"""Detectors of one text; in a lineage they judge the text in question."""
CHAINS = {"wordnet": "WordNet", "mt+wordnet": "MT + WordNet", "strong": "strong", "llm": "language model"}
MODELS = {"smollm2": "SmolLM2", "gemma3-270m": "Gemma 3"}
NEGATIVES = {
    "against both": "both",
    "against the same model without watermark": "unwatermarked",
    "against human text": "human",
}


def _slider(description: str, value: int, low: int, high: int, step: int = 1, **options) -> widgets.IntSlider:
    return widgets.IntSlider(description=description, value=value, min=low, max=high, step=step, **options)


def _rate(description: str, value: float, low: float, high: float, step: float = 0.05, **options) -> widgets.FloatSlider:
    return widgets.FloatSlider(description=description, value=value, min=low, max=high, step=step, **options)


def _depth(value: int = 8, high: int = 8) -> widgets.IntSlider:
    return _slider("Paraphrase depth d", value, 0, high)


def _chain_choice(names: Sequence[str], value: str = experiment.HARD) -> widgets.Dropdown:
    options = [(CHAINS.get(name, name), name) for name in names]
    return widgets.Dropdown(options=options, value=value if value in names else names[0], description="Paraphraser")


def _negatives_choice() -> widgets.Dropdown:
    return widgets.Dropdown(options=list(NEGATIVES.items()), description="Watermarked text …")


def _lengths_choice(table: pd.DataFrame, value: int) -> widgets.ToggleButtons:
    lengths = sorted(int(length) for length in table["T"].unique())
    chosen = value if value in lengths else lengths[0]
    return widgets.ToggleButtons(options=lengths, value=chosen, description="Tokens per text T")


# Which curves a protocol shows


def _curves(table: pd.DataFrame, protocol: str, detectors: Sequence[str]) -> dict[str, pd.DataFrame]:
    """AUC by detector over the depths of a protocol; those of one text are carried over to the lineages."""
    found = {}
    own = table[table["protocol"] == protocol]
    for name in detectors:
        if name in ONE_TEXT:
            rows = table[(table["protocol"] == "single") & (table["detector"] == name)]
            if protocol == "suffix":
                last = rows[rows["depth"] == rows["depth"].max()]
                rows = pd.concat([last.assign(depth=depth) for depth in sorted(own["depth"].unique())] or [last])
        else:
            rows = own[own["detector"] == name.replace("static@first", "static+lr")]
        if len(rows):
            found[name] = rows.sort_values("depth")
    return found


def _rocs(
    roc: experiment.Roc, detectors: Iterable[str], protocol: str, depth: int, judged: int, **where
) -> dict[str, np.ndarray]:
    """False and true positive rates (2, F) of each detector, those of one text at the depth that is judged."""
    found = {}
    for name in detectors:
        place = ("single", judged) if name in ONE_TEXT else (protocol, depth)
        with contextlib.suppress(ValueError):  # not measured
            rates = roc.of(place[0], name.replace("static@first", "static+lr"), depth=place[1], **where)
            found[name] = np.stack([roc.fpr, rates])
    return found


def _interval(row: pd.Series) -> str:
    return f"<b>{row['auc']:.3f}</b> [{row['lo']:.3f}, {row['hi']:.3f}]"


_NOT_MEASURED = (
    "Not measured: a lineage needs two texts, of at most eight rounds, and texts of a language model's chain are short. Move "
    "the depth, or choose fewer tokens."
)


def _points(gap: pd.Series) -> str:
    """A difference of AUCs with its interval."""
    return "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*(100 * gap[["difference", "lo", "hi"]])).replace("-", "−")


def _select(table: pd.DataFrame, **equal) -> pd.DataFrame:
    for column, value in equal.items():
        table = table[table[column] == value]
    return table


@dataclass(frozen=True, eq=False)
class _Seen:
    """What a panel of AUCs shows, for its words.

    Attributes:
        protocol, depth: what the detectors are given.
        judged: depth of the text in question, the end of the chain for a suffix.
        curves: AUC over depth, by detector.
        gaps: paired differences of this protocol and depth.
    """

    protocol: str
    depth: int
    judged: int
    curves: Mapping[str, pd.DataFrame]
    gaps: pd.DataFrame

    def auc(self, name: str) -> pd.Series | None:
        return _first(_select(self.curves.get(name, pd.DataFrame({"depth": []})), depth=self.depth))

    def gap(self, name: str, versus: str) -> str | None:
        row = _first(_select(self.gaps, detector=name, versus=versus))
        return None if row is None else _points(row)


def _first(rows: pd.DataFrame) -> pd.Series | None:
    return rows.iloc[0] if len(rows) else None


def _auc_panel(
    name: str,
    tables: Mapping[str, pd.DataFrame],
    roc: experiment.Roc,
    shown: Mapping[str, Sequence[str]],
    words: Callable[[_Seen], str],
    caption: str,
    *,
    protocol: str,
    length: int,
) -> Panel:
    """AUC against depth beside the ROC at one depth, of the detectors that `shown` has for each protocol."""
    table, gaps = tables["auc"], tables["differences"]
    everything = list(dict.fromkeys(detector for detectors in shown.values() for detector in detectors))
    offered = [(SEES[key], key) for key in shown if key in set(table["protocol"])]

    def draw(figure, _, protocol: str, depth: int, length: int, paraphraser: str, negatives: str) -> str:
        where = dict(T=length, paraphraser=paraphraser, negatives=negatives)
        rows = _select(table, **where)
        to_the_end = protocol == "suffix" and not rows.empty
        judged = int(rows.loc[rows["protocol"] == "single", "depth"].max()) if to_the_end else depth
        curves = _curves(rows, protocol, shown[protocol])
        figures.draw_auc_curves(figure, curves, _rocs(roc, curves, protocol, depth, judged, **where), depth)
        return words(_Seen(protocol, depth, judged, curves, _select(gaps, protocol=protocol, depth=depth, **where)))

    return Panel(
        name,
        figure=figures.auc_curves(everything),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "protocol": widgets.RadioButtons(options=offered, value=protocol, description="Texts the detector is given"),
            "depth": _depth(),
            "length": _lengths_choice(table, length),
            "paraphraser": _chain_choice(list(dict.fromkeys(table["paraphraser"]))),
            "negatives": _negatives_choice(),
        },
        caption=caption,
    )


def claim(tables: Mapping[str, pd.DataFrame], roc: experiment.Roc, protocol: str = "prefix", length: int = 40) -> Panel:
    """The headline: PSS beside the z-test along a chain of paraphrases, under four rules of what a detector may read.

    Args:
        tables: "auc" and "differences" of `experiment`.
        roc: `experiment.stored_roc()`.
        protocol: to open with, a key of `SEES`.
        length: T to open with.
    """
    shown = {name: ("z", "static+lr" if name == "single" else "pss+static+lr") for name in SEES}

    def words(seen: _Seen) -> str:
        name = shown[seen.protocol][1]
        z, own, gap = seen.auc("z"), seen.auc(name), seen.gap(name, "z")
        if z is None:
            return _NOT_MEASURED
        text = f"The text D{seen.judged} alone: z has an AUC of {_interval(z)}"
        if own is None or gap is None:
            return f"{text}. A pattern over depth needs at least two texts: go to depth 2 or beyond."
        label = "its 21 features" if seen.protocol == "single" else "PSS and features of the texts given"
        return f"{text}; {label} {_interval(own)}: <b>{gap}</b>."

    return _auc_panel(
        "claim",
        tables,
        roc,
        shown,
        words,
        "Bands and brackets are 95 % intervals over documents. Look at the blue curve while you change what the detector is "
        "given: where does its lead over z come from?",
        protocol=protocol,
        length=length,
    )


def main_figure(tables: Mapping[str, pd.DataFrame], roc: experiment.Roc, protocol: str = "single", length: int = 100) -> Panel:
    """The main figure: AUC of all detectors against depth, and their ROC; arguments as for `claim`."""
    lineage = ("z", "z_unique", "winmax", "static+lr", "pss+static+lr", "pss+static+xgb")
    shown = {name: ONE_TEXT if name == "single" else lineage for name in SEES}

    def words(seen: _Seen) -> str:
        found = [(row["auc"], figures.DETECTORS[name][0]) for name in seen.curves if (row := seen.auc(name)) is not None]
        ranked = ", ".join(f"{label} <b>{value:.3f}</b>" for value, label in sorted(found, reverse=True))
        return f"Depth {seen.depth}, best to worst: {ranked}." if found else _NOT_MEASURED

    return _auc_panel(
        "main-figure",
        tables,
        roc,
        shown,
        words,
        "With one text z is hard to beat, whatever the features. Switch to <i>all so far</i>: the blue curves jump, and no "
        "feature has changed, only what is read. Click a name in the legend to hide it.",
        protocol=protocol,
        length=length,
    )


def information(tables: Mapping[str, pd.DataFrame], roc: experiment.Roc, protocol: str = "prefix", length: int = 40) -> Panel:
    """PSS beside plain z scores of the very same texts; arguments as for `claim`."""
    rivals = ("z", "static@first", "pss_only", "pss+static+lr", "z@first", "z_mean", "lr_z")
    shown = {name: rivals for name in SEES if name != "single"}

    def words(seen: _Seen) -> str:
        own = seen.auc("pss+static+lr")
        if own is None:
            return _NOT_MEASURED
        over = {name: seen.gap("pss+static+lr", name) for name in ("z", "z@first", "lr_z")}
        alone = f"z of D{seen.judged} alone"
        return (
            f"PSS + features {_interval(own)}: {over['z']} against {alone}. But given the same texts: <b>{over['z@first']}</b> "
            f"against the z of the first one, <b>{over['lr_z']}</b> against a regression on their z's."
        )

    return _auc_panel(
        "information",
        tables,
        roc,
        shown,
        words,
        "All but the orange curve read the same texts. Look whether blue is above the grey and purple ones: if not, the gain "
        "of the last panel is information, not features.",
        protocol=protocol,
        length=length,
    )


# Texts


class _Texts:
    """Positions of one model's texts by paraphraser, kind, document and depth; of at least `length` tokens."""

    def __init__(self, corpus: Corpus, length: int = 0):
        rows = corpus.rows.reset_index(drop=True)
        rows = rows[rows["llm"] == experiment.MAIN]
        enough = rows.groupby("paraphraser")["length"].transform("min") >= length
        self.corpus, self.rows = corpus, rows[enough].assign(at=rows.index[enough])
        self.paraphrasers = list(dict.fromkeys(self.rows["paraphraser"]))
        self.hardest = experiment.HARD if experiment.HARD in self.paraphrasers else self.paraphrasers[-1]
        self._found: dict[tuple[str, str], pd.DataFrame] = {}

    def of(self, paraphraser: str, kind: str) -> pd.DataFrame:
        """Positions, rows documents and columns depths."""
        key = paraphraser, kind
        if key not in self._found:
            rows = _select(self.rows, paraphraser=paraphraser, kind=kind)
            self._found[key] = rows.pivot(index="doc", columns="depth", values="at")
        return self._found[key]

    def options(self) -> list[tuple[str, int]]:
        """Documents as a dropdown shows them."""
        first = self.rows.drop_duplicates("doc").sort_values(["domain", "doc"])
        return [(f"{row.domain}, document {row.doc}", int(row.doc)) for row in first.itertuples()]

    def freshest(self) -> int:
        """The document whose generated texts repeat themselves least: the small model often loops."""
        first = self.rows[(self.rows["depth"] == 0) & (self.rows["kind"] != "human")]
        fresh = pd.Series(self.corpus.fresh[first["at"]].mean(1), index=first["doc"].to_numpy())
        return int(fresh.groupby(level=0).min().idxmax())

    def bits(self, at: np.ndarray, right_key: bool = True) -> np.ndarray:
        return (self.corpus.bits if right_key else self.corpus.wrong_bits)[at]


def _document_choice(texts: _Texts) -> widgets.Dropdown:
    return widgets.Dropdown(options=texts.options(), value=texts.freshest(), description="Document")


def _kind_choice(kinds: Sequence[str], value: str = "watermarked") -> widgets.Dropdown:
    names = [(figures.KIND_NAMES[kind], kind) for kind in kinds]
    return widgets.Dropdown(options=names, value=value, description="Text")


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> list[str]:
    return tokenizer.batch_decode([[int(i)] for i in ids])


def tokens(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, shown: str = "plain") -> Panel:
    """Two passages by the same model; one carries a watermark. Colours show which tokens are green.

    Args:
        corpus: with ids of the generated texts.
        tokenizer: of the model that wrote them.
        shown: "plain", "right" (key) or "wrong".
    """
    texts = _Texts(corpus)
    chain = texts.hardest

    def compute(document: int):
        passages = []
        for kind in ("watermarked", "unwatermarked"):
            at = int(texts.of(chain, kind).loc[document, 0])
            bits = {name: texts.bits(at, name == "right") for name in ("right", "wrong")}
            passages.append((kind, _pieces(tokenizer, corpus.ids[at][: len(bits["right"]) + 1]), bits))
        return passages if document % 2 else passages[::-1]

    def draw(box, passages, shown: str) -> str:
        blocks, words = {}, []
        for name, (_, pieces, bits) in zip("AB", passages, strict=True):
            own = bits.get(shown)
            blocks[f"Passage {name}"] = figures.chips(pieces, own, height=330)
            if own is not None:
                words.append(f"{name}: {own.sum()} of {len(own)} green, z = <b>{fmt(float(z_score(own, GAMMA)))}</b>")
        box.value = figures.beside(blocks)
        if shown == "plain":
            return "One of the two is watermarked. Can you tell which? Guess, then turn the colours on."
        marked = "AB"[[kind for kind, *_ in passages].index("watermarked")]
        secret = f"Passage {marked} carries the watermark" if shown == "right" else "The wrong key sees nothing in either"
        return f"{'; '.join(words)}. A quarter would be green by chance. {secret}."

    return Panel(
        "tokens",
        figure=widgets.HTML(layout={"height": "380px"}),
        compute=compute,
        draw=draw,
        controls={"document": _document_choice(texts)},
        view={
            "shown": widgets.ToggleButtons(
                options=[("plain", "plain"), ("right key", "right"), ("wrong key", "wrong")], value=shown, description="Colours"
            )
        },
        caption="Green and underlined: on the list that the token before it draws. Look for long underlines: runs of green. "
        "Point at a token to see the pair that it hangs on.",
    )


def make_one(contexts: Contexts | None = None, prompt: int = 7, gamma: float = GAMMA, delta: float = 2.0) -> Panel:
    """Watermark one next token: what the bias does to its distribution, and how green 40 different contexts become.

    Args:
        contexts: stored next-token distributions; None loads them.
        prompt: index of the context to open with.
        gamma: green fraction, in [0.1, 0.9].
        delta: bias, in [0, 6].
    """
    contexts = contexts or load_contexts()
    lots = np.random.default_rng(0).random((100, 1, contexts.logits.shape[1]))  # lists by lot, the same at every γ
    shown = 12

    @functools.lru_cache(maxsize=256)
    def green_list(gamma: float, prompt: int) -> np.ndarray:
        detector = GreenBits(Watermark(contexts.vocab_size, gamma), max_rows=1)
        return detector.green_row(int(contexts.last[prompt]))[contexts.ids[prompt]]

    def compute(prompt: int, gamma: float, delta: float, temperature: float):
        green = green_list(gamma, prompt)
        before = next_token(contexts.logits, np.zeros(contexts.logits.shape[1]), 0.0, temperature)
        after = next_token(contexts.logits[prompt], green, delta, temperature)
        rates = green_probability(contexts.logits, lots < gamma, delta, temperature).mean(0)
        uniform = theory.uniform_green_rate(gamma, delta)
        entropies = theory.spike_entropy(before, gamma, delta)
        return prompt, gamma, green, before[prompt], after, entropies, rates, float(uniform)

    def draw(figure, result) -> str:
        prompt, gamma, green, before, after, entropies, rates, uniform = result
        top = contexts.tokens[prompt][:shown]
        figures.draw_make_one(
            figure,
            top,
            before[:shown],
            after[:shown],
            green[:shown],
            contexts.prompts,
            entropies,
            rates,
            prompt,
            uniform,
        )
        return (
            f"“{html.escape(contexts.prompts[prompt])} …”: its list makes the next token green with probability "
            f"<b>{fmt(float(after[green].sum()))}</b> instead of {fmt(float(before[green].sum()))}. Over lists by lot it is "
            f"{fmt(float(rates[prompt]))} on average, and never below {fmt(float(uniform * entropies[prompt]))}; if all tokens "
            f"were equally likely {fmt(uniform)}, without δ {fmt(gamma)}."
        )

    return Panel(
        "make-one",
        figure=figures.make_one(shown),
        compute=compute,
        draw=draw,
        controls={
            "prompt": widgets.Dropdown(
                options=[(str(text), i) for i, text in enumerate(contexts.prompts)], value=prompt, description="Context"
            ),
            "gamma": _rate("Green fraction γ", gamma, 0.1, 0.9),
            "delta": _rate("Bias δ (after temperature)", delta, 0, 6, 0.25),
            "temperature": _rate("Temperature τ", 0.7, 0.3, 1.5, 0.1),
        },
        caption="Left, twelve of 200 tokens. Right, every context is a dot, and the dashed line is what theory guarantees. "
        "Look at the dots far left: where the model is sure, there is nothing to choose, and no watermark.",
    )


def z_test(corpus: Corpus, length: int = 50) -> Panel:
    """The z-test at any length of text: histograms, ROC, and the closed form of independent bits.

    Args:
        corpus: bits of all texts.
        length: T, tokens scored, from 25 up to that of the corpus.
    """
    longest = corpus.bits.shape[1]
    texts, grid = _Texts(corpus, longest), np.linspace(*figures.Z_RANGE, 241)
    levels = np.linspace(0, 1, 201)

    def compute(length: int, paraphraser: str, depth: int, key: str):
        scores, green = {}, {}
        for kind in figures.KINDS:
            bits = texts.bits(texts.of(paraphraser, kind)[depth].to_numpy(), key == "right")[:, :length]
            scores[kind], green[kind] = z_score(bits, GAMMA), float(bits.mean())
        rocs, aucs = {}, {}
        for kind in ("unwatermarked", "human"):
            pooled = np.concatenate([scores["watermarked"], scores[kind]])
            labels = np.repeat([1, 0], [len(scores["watermarked"]), len(scores[kind])])
            rocs[kind], aucs[kind] = np.stack(roc_curve(labels, pooled)[:2]), auc(pooled, labels)
        return length, scores, green, rocs, aucs

    def draw(figure, result) -> str:
        length, scores, green, rocs, aucs = result
        rate = green["watermarked"]
        mean, variance = theory.expected_z(rate, GAMMA, length), theory.variance_z(rate, GAMMA)
        sd = variance**0.5
        curves = {"z": grid, "null": stats.norm.pdf(grid), "alternative": stats.norm.pdf(grid, mean, sd)}
        roc = np.stack([levels, stats.norm.sf(stats.norm.isf(levels), mean, sd)])
        step = 1 / (length * GAMMA * (1 - GAMMA)) ** 0.5  # between neighbouring values of z
        several = max(1, round(0.5 / step))
        edges = step * (np.arange(0, length + several, several) - 0.5 - GAMMA * length)
        figures.draw_z_test(figure, edges, scores, rocs, curves, roc)
        found = float((scores["watermarked"] > 4).mean())
        return (
            f"{length} tokens, {percent(rate)} of them green: AUC <b>{aucs['unwatermarked']:.3f}</b> against the same model, "
            f"{aucs['human']:.3f} against human text; closed form {theory.gaussian_auc(mean, variance):.3f}. z exceeds 4 in "
            f"{percent(found)} of the watermarked texts."
        )

    return Panel(
        "z-test",
        figure=figures.z_test(),
        compute=compute,
        draw=draw,
        controls={
            "length": _slider("Tokens scored T", length, 25, longest, 5),
            "depth": _depth(0),
            "paraphraser": _chain_choice(texts.paraphrasers),
            "key": widgets.ToggleButtons(options=[("right", "right"), ("wrong", "wrong")], description="Key"),
        },
        caption="Look how the blue hill moves right as √T while its width stays, and what each round of paraphrasing takes "
        "back. The dashed curves are normal, with the measured green rate and independent tokens.",
    )


def paraphrase(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, depth: int = 2, paraphraser: str = experiment.HARD) -> Panel:
    """One text along a chain of paraphrases: its tokens, what is left of its bigrams, and its z.

    Args:
        corpus: with ids of the generated texts.
        tokenizer: of the model that wrote them.
        depth: to open with.
        paraphraser: the chain to open with.
    """
    texts = _Texts(corpus)
    deepest = int(texts.rows["depth"].max())

    rows = texts.rows.assign(z=z_of_counts(corpus.bits.sum(1)[texts.rows["at"]], texts.rows["length"], GAMMA))
    by_depth = rows.groupby(["paraphraser", "kind", "depth"])
    means = by_depth.agg(z=("z", "mean"), z_se=("z", "sem"), survival=("survival", "mean"))

    def compute(document: int, paraphraser: str, kind: str):
        table = texts.of(paraphraser, kind)
        note = "" if document in table.index else f"Only some documents went through this chain: here is {table.index[0]}. "
        chosen = rows.loc[table.loc[table.index[0] if note else document].dropna().astype(int)]
        pieces = [_pieces(tokenizer, corpus.ids[row.at][: row.length + 1]) for row in chosen.itertuples()]
        return paraphraser, note, chosen, pieces

    def draw(figure, result, depth: int) -> str:
        paraphraser, note, chosen, pieces = result
        depth = min(depth, len(chosen) - 1)
        survival, z = chosen["survival"].to_numpy(), chosen["z"].to_numpy()
        figures.draw_chain(figure, survival, z, means.loc[paraphraser].reset_index(), depth)
        words = (
            f"{note}After {depth} rounds <b>{percent(survival[depth])}</b> of the bigrams are left, and z goes from "
            f"{fmt(float(z[0]))} to <b>{fmt(float(z[depth]))}</b>; survival alone would leave "
            f"{fmt(float(z[0] * survival[depth]))}."
        )
        bits = corpus.bits[chosen["at"].iloc[depth], : len(pieces[depth]) - 1]
        return f"{words}{figures.chips(pieces[depth], bits, height=210)}"

    figure = figures.chain(deepest)
    figure.layout.yaxis2.range = (rows["z"].min() - 1, rows["z"].max() + 1)
    return Panel(
        "paraphrase",
        figure=figure,
        compute=compute,
        draw=draw,
        controls={
            "document": _document_choice(texts),
            "paraphraser": _chain_choice(texts.paraphrasers, paraphraser),
            "kind": _kind_choice(("watermarked", "unwatermarked")),
        },
        view={"depth": Playback(deepest + 1, description="Paraphrase depth d", interval=900, value=depth)},
        caption="A green bit lives only while both tokens of its pair do. Look how z (red) falls with the share of bigrams "
        "that are left (bars), and where the chain stops changing anything.",
    )


def local_view(corpus: Corpus, size: int = 50, stride: int = 10) -> Panel:
    """Sliding windows over one text: local z, expansion to the next red token, and WinMax's best stretch.

    Args:
        corpus: bits of all texts.
        size, stride: W in [10, 100] and S in [1, 30].
    """
    texts = _Texts(corpus, corpus.bits.shape[1])

    def compute(document: int, kind: str, depth: int, size: int, stride: int, expand: bool):
        original, bits = (corpus.bits[int(texts.of(texts.hardest, kind).loc[document, d])] for d in (0, depth))
        top = best_window(original, GAMMA, MIN_SPAN)[2]
        local = local_stats(bits, GAMMA, size, stride, expand)
        return bits, windows(bits, size, stride, expand), local, top

    def draw(figure, result) -> str:
        bits, spans, local, top = result
        figure.layout.yaxis.range = (-5, nice(1.1 * max(top, 7)))
        z, best = float(z_score(bits, GAMMA)), best_window(bits, GAMMA, MIN_SPAN)
        figures.draw_local_view(figure, bits, spans, {"z": local.z, "run": local.run, "freq": local.freq}, z, best)
        widest = int((spans[:, 1] - spans[:, 0]).max())
        return (
            f"{len(spans)} windows, the widest of {widest} tokens: local z from {fmt(float(local.z.min()))} to "
            f"{fmt(float(local.z.max()))}, mean <b>{fmt(float(local.z.mean()))}</b>; the whole text has z = <b>{fmt(z)}</b>, "
            f"its best stretch {fmt(best[2])} (tokens {best[0] + 1} to {best[1]}). Longest run of green: "
            f"{int(local.run.max())}."
        )

    return Panel(
        "local-view",
        figure=figures.local_view(),
        compute=compute,
        draw=draw,
        controls={
            "document": _document_choice(texts),
            "kind": _kind_choice(list(figures.KINDS)),
            "depth": _depth(0),
            "size": _slider("Window W (tokens)", size, 10, 100, 5),
            "stride": _slider("Stride S (tokens)", stride, 1, 30),
            "expand": widgets.Checkbox(value=True, description="Expand windows to the next red token"),
        },
        caption="A window grows until both edges stand on red, so that it cuts no run. Look at a text without watermark: "
        "growing only ever adds green, so its local z lies above its global one as well.",
    )


def features(corpus: Corpus, length: int = 200, paraphraser: str | None = None) -> Panel:
    """The 21 features of one text against those of all texts, and how well each alone tells the classes apart.

    Args:
        corpus: bits of all texts.
        length: T, tokens scored.
        paraphraser: of the chain; None takes the strong one.
    """
    texts = _Texts(corpus, length)
    paraphraser = paraphraser or texts.hardest
    size, stride = window_preset(length)
    depths = sorted(int(depth) for depth in texts.rows["depth"].unique())
    table = _select(texts.rows, paraphraser=paraphraser)
    values = static_features(corpus.bits[table["at"].to_numpy(), :length], GAMMA, size=size, stride=stride)
    values.index = pd.MultiIndex.from_frame(table[["kind", "doc", "depth"]])
    low, middle, high = values.quantile([0.16, 0.5, 0.84]).to_numpy()
    scale = pd.DataFrame([middle, (high - low) / 2], index=["centre", "spread"], columns=values.columns)

    @functools.cache
    def aucs(negatives: str) -> pd.DataFrame:
        columns = {}
        for depth in depths:
            rows = values.xs(depth, level="depth")
            kinds = rows.index.get_level_values("kind")
            chosen = rows[np.isin(kinds, _kinds(negatives))]
            labels = (chosen.index.get_level_values("kind") == "watermarked").astype(int)
            columns[depth] = {name: auc(chosen[name].to_numpy(), labels) for name in FEATURES}
        return pd.DataFrame(columns).loc[list(FEATURES)]

    def draw(figure, _, document: int, kind: str, depth: int, negatives: str) -> str:
        rows = values.xs(depth, level="depth")
        kinds = rows.index.get_level_values("kind")
        others = [name for name in _kinds(negatives) if name != "watermarked"]
        classes = {"watermarked": rows[kinds == "watermarked"], "negatives": rows[np.isin(kinds, others)]}
        text, single_aucs = rows.loc[(kind, document)], aucs(negatives)
        figures.draw_features(figure, classes, text, scale, single_aucs, depth)
        best = single_aucs[depth].sub(0.5).abs().sort_values(ascending=False).index[:3]
        named = ", ".join(f"<code>{name}</code> {single_aucs.loc[name, depth]:.2f}" for name in best)
        return (
            f"Depth {depth}: alone, the best are {named}; the z of the whole text (<code>z_global</code>) reaches "
            f"<b>{single_aucs.loc['z_global', depth]:.2f}</b>. This text has z = {fmt(float(text['z_global']))}."
        )

    return Panel(
        "features",
        figure=figures.features(FEATURES, depths[-1]),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "depth": _depth(0, depths[-1]),
            "negatives": _negatives_choice(),
            "document": _document_choice(texts),
            "kind": _kind_choice(list(figures.KINDS)),
        },
        caption="Left, watermarked texts above each line, the others below it. Right, blue: higher in watermarked text; white: "
        "no use alone. Move the depth: which rows stay blue, and is any of them bluer than the last?",
    )


def _kinds(negatives: str) -> list[str]:
    return ["watermarked", *(("unwatermarked", "human") if negatives == "both" else (negatives,))]


def channel(stored: pd.DataFrame | None = None, texts: int = 400, depth: int = 8) -> Panel:
    """Synthetic bits whose paraphraser redraws at random: where is z optimal, and what are earlier texts worth?

    Args:
        stored: "channel" of `experiment`, classifiers at a few settings.
        texts: watermarked ones, and as many without.
        depth: rounds.
    """

    def compute(rate: float, q: float, length: int, bursts: str):
        mean = None if bursts == "iid" else 12.0
        marked, plain = (lineage(texts, length, p, q, depth, seed, bursts=mean) for p, seed in ((rate, 0), (GAMMA, 1)))
        labels = np.repeat([1, 0], texts)
        bits = np.concatenate([marked, plain])
        z = z_score(bits, GAMMA)  # (2n, D + 1)
        best = winmax(bits[:, [0, depth // 2, depth]], GAMMA, min_len=MIN_SPAN)
        rows = {}
        for d in range(depth + 1):
            given = z[:, 1 : d + 1] if d else z[:, :1]
            rows[d] = {"z": auc(z[:, d], labels), "z_mean": auc(given.mean(1), labels), "z@first": auc(given[:, 0], labels)}
        for column, d in enumerate((0, depth // 2, depth)):
            rows[d]["winmax"] = auc(best[:, column], labels)
        table = pd.DataFrame.from_dict(rows, orient="index")
        left = theory.surviving_rate(rate, GAMMA, q, np.arange(depth + 1))
        closed = theory.gaussian_auc(theory.expected_z(left, GAMMA, length), theory.variance_z(left, GAMMA))
        return table, closed, marked[0], (rate, q, length, bursts)

    def draw(figure, result) -> str:
        table, closed, bits, setting = result
        figures.draw_channel(figure, table, closed, bits, _stored_channel(stored, setting))
        last = table.iloc[-1]
        return (
            f"After {depth} rounds z has an AUC of <b>{last['z']:.3f}</b> (closed form {closed[-1]:.3f}), the best stretch "
            f"{last['winmax']:.3f}. Who may read round 1 has <b>{last['z@first']:.3f}</b> from its z alone; a mean over all "
            f"rounds gives {last['z_mean']:.3f}."
        )

    return Panel(
        "channel",
        figure=figures.channel(depth),
        compute=compute,
        draw=draw,
        controls={
            "rate": _rate("Green rate before paraphrasing p", 0.5, 0.25, 0.8),
            "q": _rate("Share redrawn per round q", 0.3, 0, 0.9),
            "length": _slider("Tokens T", 100, 25, 200, 25),
            "bursts": widgets.ToggleButtons(
                options=[("one by one", "iid"), ("in bursts of 12", "bursts")], description="Bits are redrawn"
            ),
        },
        caption="Of independent bits the count is all there is to know: no feature of one text can lie above z, only earlier "
        "texts can. Look whether bursts change that.",
    )


def _stored_channel(stored: pd.DataFrame | None, setting: tuple) -> dict[str, pd.DataFrame]:
    """Classifiers measured at just this setting."""
    rate, q, length, bursts = setting
    if stored is None or abs(rate - 0.5) > 1e-6 or abs(q - 0.3) > 1e-6:
        return {}
    rows = _select(stored, channel=bursts, T=length)
    protocols = {"static+lr": "single", "pss+static+lr": "prefix"}
    return {name: _select(rows, detector=name, protocol=protocol).sort_values("depth") for name, protocol in protocols.items()}


def transfer(table: pd.DataFrame, detector: str = "pss+static+lr") -> Panel:
    """Train on one kind of text, test on another.

    Args:
        table: "transfer" of `experiment`.
        detector: to open with.
    """
    table = table[table["test_domain"] != "other two"]
    for side in ("train", "test"):
        chains = table[f"{side}_paraphraser"].map(lambda name: CHAINS.get(name, name))
        table = table.assign(**{side: table[f"{side}_llm"].map(lambda name: MODELS.get(name, name)) + ", " + chains})
    rows, columns = ["train", "train_domain"], ["test", "test_domain"]
    cells = table.groupby("detector", sort=False).size()
    names = list(cells.index[cells == cells.max()])  # others were measured here and there only

    def draw(figure, _, detector: str) -> str:
        chosen = _select(table, detector=detector)
        wide = chosen.pivot(index=rows, columns=columns, values=["auc", "differ"]).sort_index().sort_index(axis=1)
        apart = (wide["differ"] == 3).to_numpy()
        figures.draw_transfer(figure, wide["auc"], apart)
        label, found = figures.DETECTORS.get(detector, (detector,))[0], wide["auc"].to_numpy()
        if not apart.any():
            return f"{label}: {np.isfinite(found).sum()} cells, from {np.nanmin(found):.3f} to {np.nanmax(found):.3f}."
        return (
            f"{label}: where domain, paraphraser and model all differ, AUC <b>{found[apart].mean():.3f}</b> on average, from "
            f"{found[apart].min():.3f} to {found[apart].max():.3f} (the paper claims 0.837 for its own data [paper])."
        )

    return Panel(
        "transfer",
        figure=figures.transfer(),
        compute=lambda: None,
        draw=draw,
        controls={},
        view={
            "detector": widgets.Dropdown(
                options=[(figures.DETECTORS.get(name, (name,))[0], name) for name in names],
                value=detector if detector in names else names[0],
                description="Detector (given D1 … D8)",
            )
        },
        caption=f"AUC in hundredths, {table['T'].iloc[0]} tokens a text, columns by the first letter of their domain; "
        "documents never occur on both sides. Look whether the framed cells are darker than the rest, and whether a z without "
        "any training does worse.",
    )


# Your own text


def paste(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    paraphraser: Paraphraser | None = None,
    text: str | None = None,
) -> Panel:
    """A text of the reader's: its tokens in colour, z, WinMax, p, and on a button a classifier's opinion and a probe.

    Args:
        corpus: to train the classifier on, and for the text to open with.
        tokenizer: of the model that may have written it.
        paraphraser: for the probe of three rounds; None leaves it out.
        text: to open with; None takes a watermarked text of the corpus.
    """
    texts = _Texts(corpus, corpus.bits.shape[1])
    if text is None:
        text = tokenizer.decode(corpus.ids[int(texts.of(texts.hardest, "watermarked").loc[texts.freshest(), 0])]).strip()
    right = Watermark(len(tokenizer), GAMMA)
    detectors = {wm.key: GreenBits(wm) for wm in (right, replace(right, key=WRONG_KEY))}
    asked = {"times": 0}

    @functools.cache
    def classifier(length: int):
        chosen = corpus.select(llm=experiment.MAIN, paraphraser=texts.hardest)
        return fit(segments(chosen, length), single(0), "static+lr")

    def compute(text: str, key: int, ask: int):
        read = functools.partial(_read, tokenizer=tokenizer, green=detectors[key])
        ids, bits = read(text)
        opinion = None
        if ask > asked["times"]:
            asked["times"] = ask
            length = max((n for n in LENGTHS if n <= len(bits)), default=0)
            chance = float(classifier(length).score(bits[None, :length])[0]) if length else None
            opinion = length, chance, _probe(text, paraphraser, read)
        return ids, bits, opinion

    def draw(box, result) -> str:
        ids, bits, opinion = result
        box.value = figures.chips(_pieces(tokenizer, ids), bits, height=330)
        z, length = float(z_score(bits, GAMMA)), len(bits)
        distinct, best = float(z_unique(ids, bits, GAMMA)), float(winmax(bits, GAMMA, min_len=min(MIN_SPAN, length)))
        words = (
            f"{bits.sum()} of {length} tokens are green: z = <b>{fmt(z)}</b> (p = {fmt(float(p_value(z)), 2)}), "
            f"distinct bigrams {fmt(distinct)}, best stretch {fmt(best)}."
        )
        if length < 50:
            words += f" <b>Too short</b>: with {length} tokens none of these is to be trusted."
        return words if opinion is None else f"{words} {_opinion(*opinion)}"

    return Panel(
        "paste",
        figure=widgets.HTML(layout={"height": "350px"}),
        compute=compute,
        draw=draw,
        controls={
            "text": widgets.Textarea(
                value=text, rows=10, continuous_update=False, description="Your text (read when you leave the box)"
            ),
            "key": widgets.ToggleButtons(options=[("right", right.key), ("wrong", WRONG_KEY)], description="Key"),
            "ask": widgets.Button(description="Ask the classifier"),
        },
        caption="Written by hand or by any model without this key, about a quarter is green. Look what is left after you "
        "change every tenth word of the text that is there.",
    )


def _read(text: str, tokenizer: PreTrainedTokenizerBase, green: GreenBits) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and bits of a text as it is received."""
    if not text.strip():
        raise ValueError("text: need at least 2 tokens, got an empty text")
    ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids, green(ids)


def _probe(text: str, paraphraser: Paraphraser | None, read) -> list[float]:
    """z after each of three rounds of a paraphraser."""
    found = []
    for round_number in range(1, 4 if paraphraser else 1):
        (text,) = paraphraser([text], round_number, seed=0)
        found.append(float(z_score(read(text)[1], GAMMA)))
    return found


def _opinion(length: int, chance: float | None, probe: Sequence[float]) -> str:
    words = "The classifier wants at least 50 tokens."
    if chance is not None:
        words = (
            f"By the 21 features of its first {length} tokens it is watermarked with probability <b>{percent(chance)}</b>, "
            "if a third of all texts are."
        )
    if probe:
        rounds = ", ".join(fmt(z) for z in probe)
        words += f" After 1, 2 and 3 rounds of WordNet z is {rounds}: nothing that the text itself did not say."
    return words
