"""The lab's tables: every detector under every protocol, with paired differences, controls and transfer.

`reproduce` measures each table as a part of its own, so that an interrupted run goes on where it stopped. `build` makes the
texts, does the same and leaves the tables in `data/`, which `stored` reads. Classifiers are trained against both kinds of
negatives and judged against each. Errors and intervals are over documents; what compares detectors is paired.
"""

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from labkit.errors import MissingAsset
from labkit.parts import claim, once, write_table
from labkit.report import Reproduction, Verdict
from labkit.watermark.channel import copy_paste, lineage
from labkit.watermark.corpus import FAST, Corpus, build_parts, load_corpus
from labkit.watermark.corpus import Recipe as TextRecipe
from labkit.watermark.detectors import BLOCKS, Detector, character_ngrams, logistic
from labkit.watermark.evaluation import NEGATIVES, Difference, Result, cross_validate, difference, evaluate, transfer
from labkit.watermark.features import pss
from labkit.watermark.lineages import Lineages, Protocol, prefix, probe, segments, single, suffix, window_preset
from labkit.watermark.scores import z_score

DATA = Path(__file__).with_name("data")
MAIN = "smollm2"  # the model whose texts the main tables are about
HARD = "strong"  # the chain that leaves least of the watermark
METHOD = "pss+static+lr"
SAME_TEXTS = ("z@first", "z_mean", "lr_z")  # baselines that see what PSS sees
STRETCH = ("pss+z+lr", "compact+lr")
BOOSTED = (0, 2, 4, 8)  # depths at which boosted trees are trained
SOURCE = ("fiction", "mt+wordnet", MAIN)  # domain, paraphraser and model that the one classifier of all is trained on
PAPER_TRANSFER = 0.837  # AUC that the abstract gives where domain, paraphraser and model all differ
PAPER_GAIN = 0.10  # its least gain over z
FPR = np.array([0, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 12.5, 15, 20, 25, 30, 35, 40, 50, 60, 70, 80, 90, 100]) / 100


@dataclass(frozen=True)
class Recipe:
    """Sizes of a reproduction and a build. Everything in `data/` follows from these.

    Attributes:
        texts: sizes of the corpus; a reproduction takes the stored one.
        documents: upper limit on the documents.
        lengths: T, scored tokens per text, of the main tables.
        depths: limit on the depths d, k of the protocols that are measured; None is all.
        repeats: cross-validations, each with its own split.
        paraphrasers: whose chains the main tables are about; None is all.
        thorough: lengths at which ablations and variants are measured too, on the hard chain.
        slow: with boosted trees and the convolutional network there, and the classifier of text.
        rows: chains per class of the synthetic channel.
    """

    texts: TextRecipe = field(default_factory=TextRecipe)
    documents: int = 1000
    lengths: tuple[int, ...] = (40, 50, 100, 150, 200)
    depths: tuple[int, ...] | None = None
    repeats: int = 5
    paraphrasers: tuple[str, ...] | None = None
    thorough: tuple[int, ...] = (40, 100)
    slow: bool = True
    rows: int = 400


_FAST = Recipe(
    texts=FAST, documents=30, lengths=(40, 100), depths=(0, 1, 2, 8), repeats=1, paraphrasers=(HARD,), slow=False, rows=60
)


# Rows of tables


@dataclass(frozen=True)
class _Judge:
    """Results on one set of chains, each computed once, as rows of a table.

    Attributes:
        chains: what is judged.
        repeats: cross-validations.
        labels: columns that all rows share.
        negatives: which kinds to judge against; training takes what the chains hold.
    """

    chains: Lineages
    repeats: int
    labels: dict
    negatives: tuple[str, ...] = NEGATIVES
    known: dict = field(default_factory=dict)

    def result(self, protocol: Protocol, detector: str, negatives: str) -> Result:
        """A detector that reads one text of a lineage is that of this text alone."""
        depths = self.chains.depths
        if detector in ("z", "z_unique", "winmax"):
            protocol = single(protocol.text_in_question(depths))
        elif detector == "z@first" or detector.startswith("static+"):
            protocol, detector = single(protocol.depths(depths)[0]), detector.replace("z@first", "z")
        if (protocol, detector) not in self.known:
            self.known[protocol, detector] = evaluate(self.chains, protocol, detector, n_repeats=self.repeats)
        if (protocol, detector, negatives) not in self.known:
            self.known[protocol, detector, negatives] = self.known[protocol, detector].against(negatives)
        return self.known[protocol, detector, negatives]

    def rows(self, protocol: Protocol, detectors: Iterable[str], pairs: Iterable[tuple[str, str]] = ()) -> Iterator[dict]:
        """AUC of the detectors, and the paired differences of `pairs`, against each kind of negatives."""
        for negatives in self.negatives:
            labels = {"protocol": protocol.name, "depth": protocol.depth, "T": self.chains.length, "negatives": negatives}
            labels |= self.labels
            for name in detectors:
                result = self.result(protocol, name, negatives)
                yield labels | {"detector": name, "versus": ""} | _measured(result) | {"roc": _curve(result.roc)}
            for name, versus in pairs:
                gap = difference(self.result(protocol, name, negatives), self.result(protocol, versus, negatives))
                yield labels | {"detector": name, "versus": versus} | _interval(gap)


def _measured(result: Result) -> dict:
    low, high = result.ci
    return {"auc": result.auc, "se": result.se, "lo": low, "hi": high, "se_repeats": result.se_repeats}


def _curve(roc: pd.DataFrame) -> str:
    """True positive rates on the grid `FPR`, one hexadecimal byte each."""
    tpr = roc["tpr"].to_numpy()[np.searchsorted(roc["fpr"], FPR, side="right") - 1]
    return (255 * tpr).round().astype(np.uint8).tobytes().hex()


def _interval(gap: Difference) -> dict:
    return {"auc": gap.value, "se": gap.se, "lo": gap.ci[0], "hi": gap.ci[1]}


# Measurements, each a part


def _limited(corpus: Corpus, documents: int, **equal) -> Corpus:
    """Rows of these columns; of a limited number of documents evenly from all, so that every domain stays."""
    kept = corpus.select(**equal)
    docs = kept.rows.sort_values("domain", kind="stable")["doc"].unique()
    chosen = docs[np.linspace(0, len(docs) - 1, min(documents, len(docs))).round().astype(int)]
    return kept.select(doc=chosen.tolist())


def _wanted(protocols: Iterable[Protocol], recipe: Recipe) -> list[Protocol]:
    return [protocol for protocol in protocols if recipe.depths is None or protocol.depth in recipe.depths]


def _main(corpus: Corpus, recipe: Recipe, paraphraser: str, length: int) -> pd.DataFrame:
    """Every detector of one chain of paraphrases at one length, under every protocol."""
    chains = segments(_limited(corpus, recipe.documents, llm=MAIN, paraphraser=paraphraser), length)
    judge = _Judge(chains, recipe.repeats, {"paraphraser": paraphraser})
    last, thorough, rows = max(chains.depths), paraphraser == HARD and length in recipe.thorough, []
    whole = not chains.rows["segment"].any()  # what repeats in a later segment is known of its whole text alone
    for protocol in _wanted(map(single, chains.depths), recipe):
        names = ["z", "winmax", "static+lr", *["z_unique"] * whole]
        rows += judge.rows(protocol, names, [(name, "z") for name in names[1:]])
    for protocol in _wanted(map(prefix, range(2, last + 1)), recipe):
        ablations = [f"no {block}" for block in BLOCKS] * (protocol.depth == last)
        rows += _lineage_rows(judge, protocol, [*STRETCH, "pss_only", *ablations] * thorough)
    for protocol in _wanted(map(suffix, range(1, last)), recipe):
        rows += _lineage_rows(judge, protocol, ())
    for protocol in _wanted((probe(depth) for depth in range(last - 2)), recipe):
        rows += _lineage_rows(judge, protocol, ())
    return pd.DataFrame(rows)


def _lineage_rows(judge: _Judge, protocol: Protocol, variants: Iterable[str]) -> Iterator[dict]:
    """The method, its variants, baselines on the same texts, and what the method and its variants add to these."""
    pairs = [(METHOD, versus) for versus in ("z", *SAME_TEXTS, "static+lr")]
    pairs += [(name, versus) for name in variants for versus in (METHOD, "z", "z@first", "lr_z")]
    return judge.rows(protocol, [METHOD, *variants, "static+lr", "z", "winmax", *SAME_TEXTS], pairs)


def _slow(corpus: Corpus, recipe: Recipe, length: int) -> pd.DataFrame:
    """Boosted trees and the convolutional network on the hard chain."""
    chains = segments(_limited(corpus, recipe.documents, llm=MAIN, paraphraser=HARD), length)
    judge = _Judge(chains, recipe.repeats, {"paraphraser": HARD})
    last, rows = max(chains.depths), []
    for depth in (depth for depth in BOOSTED if depth <= last):
        networks = ["cnn"] * (depth in (0, last))
        names = ["static+xgb", *networks]
        rows += judge.rows(single(depth), names, [(name, versus) for name in names for versus in ("z", "static+lr")])
        if depth >= 2:
            names = ["pss+static+xgb", *["pss+static+xgb600", *networks] * (depth == last)]
            pairs = [(name, versus) for name in names for versus in (METHOD, "z", *SAME_TEXTS)]
            rows += judge.rows(prefix(depth), names, pairs)
    return pd.DataFrame(rows)


def _decay(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """Mean z and bigram survival at each depth, and the mean change of z since the depth before, over documents."""
    rows, by = [], ["paraphraser", "llm", "kind"]
    for labels in corpus.rows[by].drop_duplicates().itertuples(index=False):
        kept = _limited(corpus, recipe.documents, **labels._asdict())
        length = int(kept.rows["length"].min())
        z = z_score(kept.bits[:, :length], kept.gamma)
        wide = kept.rows.assign(z=z).pivot(index="doc", columns="depth", values="z")
        step, survival = wide.diff(axis=1), kept.rows.groupby("depth")["survival"].mean()
        for depth in wide:
            row = {"depth": depth, "T": length, "documents": len(wide), "z": wide[depth].mean(), "z_stderr": wide[depth].sem()}
            row |= {"step": step[depth].mean(), "step_stderr": step[depth].sem(), "survival": survival[depth]}
            rows.append(labels._asdict() | row)
    return pd.DataFrame(rows)


def _keys(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """The pipeline with the right key and with another one, against un-watermarked text of the same model."""
    rows = []
    kept = _limited(corpus, recipe.documents, llm=MAIN, paraphraser=HARD, kind=["watermarked", "unwatermarked"])
    for (control, bits), length in itertools.product(
        {"right key": kept.bits, "wrong key": kept.wrong_bits}.items(),
        [length for length in recipe.thorough if length <= kept.bits.shape[1]],
    ):
        chains = segments(replace(kept, bits=bits), length)
        judge = _Judge(chains, recipe.repeats, {"control": control, "paraphraser": HARD}, ("unwatermarked",))
        last = max(chains.depths)
        for depth in (0, last):
            rows += judge.rows(single(depth), ("z", "winmax", "static+lr", *["static+xgb"] * recipe.slow))
        names = (METHOD, *["pss+static+xgb"] * recipe.slow, "pss_only", *SAME_TEXTS)
        rows += judge.rows(prefix(last), names)
    return pd.DataFrame(rows).drop(columns=["versus", "roc"])


def _unequal_lengths(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """No watermark anywhere: a half of each text, drawn at random, against the other, once as long and once 0.6 times that.

    Missing windows become zeros, as in the predecessor's code; `segments` would refuse.
    """
    kept = _limited(corpus, recipe.documents, llm=MAIN, paraphraser=HARD, kind="unwatermarked")
    length = kept.bits.shape[1] // 2
    size, stride = window_preset(length)
    halves = segments(kept, length, size=size, stride=stride, most=2)
    first = np.random.default_rng(0).permuted(np.tile([True, False], (len(halves) // 2, 1)), axis=1).ravel()
    table = pd.concat([halves.rows[first].assign(label=1), halves.rows[~first].assign(label=0)], ignore_index=True)
    rows = []
    for control, rest in (("equal lengths", length), ("unequal lengths", 3 * length // 5)):
        parts = [
            replace(halves.take(mask), bits=halves.bits[mask, :, :stop], fresh=halves.fresh[mask, :, :stop])
            for mask, stop in ((first, length), (~first, rest))
        ]
        designs = [np.hstack([part.static, pss(part.local_z[:, 1:])]) for part in parts]
        width = max(design.shape[1] for design in designs)
        design = np.vstack([np.pad(found, ((0, 0), (0, width - found.shape[1]))) for found in designs])
        scored = cross_validate(Detector(METHOD, pss, logistic()), design, table, n_repeats=recipe.repeats)
        labels = {"control": control, "paraphraser": HARD, "protocol": "prefix", "depth": max(halves.depths), "T": length}
        labels |= {"negatives": "unwatermarked", "detector": METHOD}
        rows.append(labels | _measured(Result(METHOD, "", table, *scored)))
    return pd.DataFrame(rows)


def _text_only(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """Characters instead of bits: what separates the classes without the key."""
    from labkit.watermark.generate import load_tokenizer  # brings torch

    rows, tokenizer = [], load_tokenizer(MAIN)
    kept = _limited(corpus, recipe.documents, llm=MAIN, paraphraser=HARD, kind=["watermarked", "unwatermarked"])
    for depth in (0, int(kept.rows["depth"].max())):
        at = kept.select(depth=depth)
        written = np.array(at.texts(tokenizer), dtype=object)
        detector = Detector("tfidf", pss, character_ngrams())
        scored = cross_validate(detector, written, at.rows, n_repeats=recipe.repeats)
        labels = {"control": "text only", "paraphraser": HARD, "protocol": "single", "depth": depth, "T": at.bits.shape[1]}
        labels |= {"negatives": "unwatermarked", "detector": "tfidf"}
        rows.append(labels | _measured(Result("tfidf", str(single(depth)), at.rows, *scored)))
    return pd.DataFrame(rows)


def _transfer(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """Train on one domain, paraphraser and model; test on another, or on both other domains together."""
    full = corpus.rows[corpus.rows["depth"] == _where(corpus.rows, paraphraser=HARD)["depth"].max()]
    length = min(100, int(full["length"].min()))
    parts = [
        segments(_limited(corpus, recipe.documents, llm=llm, paraphraser=paraphraser), length)
        for llm, paraphraser in full[["llm", "paraphraser"]].drop_duplicates().itertuples(index=False)
    ]
    chains = replace(
        parts[0],
        rows=pd.concat([part.rows for part in parts], ignore_index=True),
        bits=np.concatenate([part.bits for part in parts]),
        fresh=np.concatenate([part.fresh for part in parts]),
    )
    cells = chains.rows[["domain", "paraphraser", "llm"]].drop_duplicates().itertuples(index=False, name=None)
    cells = sorted(cells)
    targets = [*cells, *sorted({("other two", *cell[1:]) for cell in cells})]
    rows = []
    for source, target in itertools.product(cells, targets):
        masks = _matches(chains.rows, source, source), _matches(chains.rows, target, source)
        tested = chains.rows["doc"][masks[1]].nunique()
        differ = sum(a != b for a, b in zip(source, target, strict=True))
        for name in (METHOD, "z", *("z@first", "lr_z") * recipe.slow, *["pss+static+xgb"] * (recipe.slow and source == SOURCE)):
            result = transfer(chains, prefix(max(chains.depths)), name, *masks, n_splits=min(5, tested))
            row = {f"train_{key}": value for key, value in zip(("domain", "paraphraser", "llm"), source, strict=True)}
            row |= {f"test_{key}": value for key, value in zip(("domain", "paraphraser", "llm"), target, strict=True)}
            rows.append(row | {"differ": differ, "detector": name, "T": length} | _measured(result))
    return pd.DataFrame(rows).drop(columns="se_repeats")


def _matches(rows: pd.DataFrame, cell: tuple[str, str, str], source: tuple[str, str, str]) -> np.ndarray:
    domain, paraphraser, llm = cell
    domains = rows["domain"] != source[0] if domain == "other two" else rows["domain"] == domain
    return (domains & (rows["paraphraser"] == paraphraser) & (rows["llm"] == llm)).to_numpy()


def _copy_paste(corpus: Corpus, recipe: Recipe) -> pd.DataFrame:
    """A stretch of a model's text inside human text: watermarked against un-watermarked stretches in the same places."""
    length = int(_where(corpus.rows, llm=MAIN, paraphraser=HARD)["length"].min())
    kept = {
        kind: segments(_limited(corpus, recipe.documents, llm=MAIN, paraphraser=HARD, depth=0, kind=kind), length)
        for kind in ("watermarked", "unwatermarked", "human")
    }
    rows = []
    for span in (span for span in (10, 20, 30, 40, 60, 100, 200) if span <= length):
        pasted = [
            copy_paste(kept[kind].bits[:, 0], kept["human"].bits[:, 0], span, np.random.default_rng(span))
            for kind in ("watermarked", "unwatermarked")
        ]
        bits = np.concatenate(pasted)[:, None]
        table = pd.concat([kept["watermarked"].rows, kept["unwatermarked"].rows], ignore_index=True)
        chains = replace(kept["human"], rows=table, bits=bits, fresh=np.ones_like(bits))
        judge = _Judge(chains, recipe.repeats, {"span": span}, ("unwatermarked",))
        rows += judge.rows(single(0), ("z", "winmax", "static+lr"), [("winmax", "z"), ("static+lr", "z")])
    return pd.DataFrame(rows).drop(columns=["roc", "protocol", "depth", "negatives"])


def _channel(corpus: Corpus, recipe: Recipe, name: str, bursts: float | None) -> pd.DataFrame:
    """Synthetic bits: green rate 0.5, and every round redraws 30 % of them at the rate 0.25."""
    n, length, last = recipe.rows, 100, 8
    bits = np.concatenate([lineage(n, length, rate, 0.3, last, seed, bursts=bursts) for seed, rate in enumerate((0.5, 0.25))])
    table = pd.DataFrame({"doc": np.arange(2 * n) % min(n, 100), "label": np.repeat([1, 0], n)})  # groups, for the bootstrap
    table["kind"] = np.where(table["label"] == 1, "watermarked", "unwatermarked")
    size, stride = window_preset(length)
    chains = Lineages(table, bits, np.ones_like(bits), tuple(range(last + 1)), size=size, stride=stride)
    judge = _Judge(chains, recipe.repeats, {"channel": name, "paraphraser": f"channel, {name}"}, ("unwatermarked",))
    rows = []
    for protocol in _wanted(map(single, range(last + 1)), recipe):
        names = ["z", "winmax", "static+lr", *["static+xgb"] * (recipe.slow and protocol.depth in BOOSTED)]
        rows += judge.rows(protocol, names, [(detector, "z") for detector in names[1:]])
    for make, least in ((prefix, 2), (suffix, 1), (probe, 0)):
        depths = {prefix: range(least, last + 1), suffix: range(least, last), probe: range(least, last - 2)}[make]
        for protocol in _wanted(map(make, depths), recipe):
            trees = recipe.slow and make is prefix and protocol.depth in BOOSTED
            rows += _lineage_rows(judge, protocol, ["pss+static+xgb"] * trees)
    return pd.DataFrame(rows).drop(columns="roc")


def _parts(corpus: Corpus, recipe: Recipe) -> dict[str, Callable[[Corpus, Recipe], pd.DataFrame]]:
    """The measurements by the name of their part."""
    jobs = {}
    longest = corpus.rows[corpus.rows["llm"] == MAIN].groupby("paraphraser", sort=False)["length"].min()
    for (paraphraser, limit), length in itertools.product(longest.items(), recipe.lengths):
        if length <= limit and (recipe.paraphrasers is None or paraphraser in recipe.paraphrasers):
            jobs[f"main-{paraphraser}-{length}"] = functools.partial(_main, paraphraser=paraphraser, length=length)
    for length in recipe.thorough if recipe.slow else ():
        jobs[f"slow-{length}"] = functools.partial(_slow, length=length)
    jobs |= {
        "decay": _decay,
        "keys": _keys,
        "lengths": _unequal_lengths,
        "copy_paste": _copy_paste,
        "transfer": _transfer,
    }
    if recipe.slow:
        jobs["text"] = _text_only
    for name, bursts in (("iid", None), ("bursts", 12.0)):
        jobs[f"channel-{name}"] = functools.partial(_channel, name=name, bursts=bursts)
    return jobs


def _measure(corpus: Corpus, recipe: Recipe, parts: Path) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """All parts, and what is left out; what the folder holds already is not measured again."""
    found, missing = {}, []
    for name, job in tqdm(_parts(corpus, recipe).items(), desc="tables", unit="part"):

        def measure(path: Path, job: Callable = job) -> None:
            job(corpus, recipe).to_csv(path, index=False)

        try:
            found[name] = _read(once(parts / f"{name}.csv", measure))
        except MissingAsset as error:
            missing.append(f"{name} is left out: {error}")
    return found, missing


def _read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, na_values=["nan", ""])  # "" is missing, "None" and "NA" are words


# Summaries


def _tables(found: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """What is shown and stored."""
    main = pd.concat([table for name, table in found.items() if name.startswith(("main", "slow"))], ignore_index=True)
    channel = pd.concat([table for name, table in found.items() if name.startswith("channel")], ignore_index=True)
    copied, keys = found["copy_paste"], found["keys"]
    gaps = pd.concat([table[table["versus"].notna()] for table in (main, channel)], ignore_index=True)
    return {
        "auc": _levels(main),
        "differences": gaps.rename(columns={"auc": "difference"}).drop(columns=["se_repeats", "roc", "channel"]),
        "transfer": found["transfer"],
        "controls": pd.concat([keys, *(found[name] for name in ("lengths", "text") if name in found)], ignore_index=True),
        "channel": _levels(channel).drop(columns=["paraphraser", "negatives"]),
        "copy_paste": copied.assign(versus=copied["versus"].fillna("")),
        "decay": found["decay"],
    }


def _levels(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["versus"].isna()].drop(columns="versus").reset_index(drop=True)


def _readable(tables: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Short tables to read: the hard chain at its ends, what the method adds there, transfer by what differs."""
    levels = tables["auc"].rename(columns={"se": "auc_stderr"})
    level = _where(levels, paraphraser=HARD, T=40)
    ends = level["depth"].isin([0, level["depth"].max()]) | (level["protocol"] == "suffix")
    main = level[ends & (level["protocol"] != "probe")].pivot(
        index=["protocol", "depth", "detector"], columns="negatives", values=["auc", "auc_stderr"]
    )
    main.columns = [f"{kind}{'_stderr' if name.endswith('stderr') else ''}" for name, kind in main.columns]
    gap = tables["differences"].rename(columns={"se": "difference_stderr"})
    gap = gap[(gap["protocol"] == "prefix") & (gap["depth"] == gap["depth"].max()) & (gap["negatives"] != "human")]
    gap = gap[gap["detector"].isin([METHOD, "pss+static+xgb", *STRETCH]) & gap["versus"].isin(["z", *SAME_TEXTS])]
    gap = gap[gap["T"].isin([40, 100])]
    moved = tables["transfer"].groupby(["T", "differ", "detector"])["auc"].agg(["count", "mean", "min", "max"]).reset_index()
    shown = ["paraphraser", "T", "negatives", "detector", "versus", "difference", "difference_stderr", "lo", "hi"]
    return {
        "hard_chain": main.reset_index(),
        "what_the_method_adds": gap[shown].reset_index(drop=True),
        "transfer_by_difference": moved,
        "controls": tables["controls"].rename(columns={"se": "auc_stderr"}),
        "copy_paste": tables["copy_paste"].rename(columns={"se": "auc_stderr"}),
        "decay": tables["decay"],
    }


def reproduce(*, fast: bool = False, seeds: int | None = None, out: Path) -> Reproduction:
    """Judge every detector under every protocol on the stored texts.

    Args:
        fast: one cross-validation of 30 documents at three depths, to see that it works; not for figures.
        seeds: cross-validations; None means 5.
        out: folder whose `parts/` keeps each finished part; a second call goes on from there.
    """
    recipe = _FAST if fast else Recipe()
    if seeds is not None:
        recipe = replace(recipe, repeats=seeds)
    corpus = load_corpus()
    found, missing = _measure(corpus, recipe, Path(out) / f"parts{'-fast' if fast else ''}-{recipe.repeats}")
    tables = _tables(found)
    documents = _where(corpus.rows, llm=MAIN).groupby("paraphraser")["doc"].nunique()
    sizes = ", ".join(f"{name} {min(count, recipe.documents)}" for name, count in documents.items())
    notes = [
        f"Documents of {MAIN}: {sizes}; {recipe.repeats} cross-validations by document. ± and lo … hi (95 %) are over "
        "documents, 2000 bootstrap samples, paired for differences; se_repeats is over cross-validations.",
        "Both kinds of negatives are trained against; columns and rows say against which a detector is judged.",
        "prefix(d) gives the texts at depths 1 … d and is compared with z at depth d, as in the paper; z@first, z_mean and "
        "lr_z see the same texts as PSS.",
        "Logistic regressions have scikit-learn's C = 1, pss+z+lr and compact+lr 0.01; trees and network one setting for all.",
        "The paper's models are Llama-3-8B and Qwen2-7B with paraphrasers of 7B; here 135M and 270M, and paraphrasers without "
        "a large model.",
        *missing,
    ]
    shown = _readable(tables) | {name: tables[name] for name in ("auc", "differences", "transfer", "channel")}
    return Reproduction(shown, _verdicts(tables), notes)


def _where(table: pd.DataFrame, **labels) -> pd.DataFrame:
    return table[np.logical_and.reduce([table[name] == value for name, value in labels.items()])]


def _verdicts(tables: dict[str, pd.DataFrame]) -> list[Verdict]:
    return [*_on_z(tables), *_on_the_method(tables), *_on_transfer(tables["transfer"]), *_on_controls(tables)]


def _verdict(claim: str, row: pd.Series, target: str, holds: bool, source: str = "ours", column: str = "auc") -> Verdict:
    return Verdict(claim, float(row[column]), float(row["se"]), target, bool(holds), source)


def _on_z(tables: dict[str, pd.DataFrame]) -> Iterator[Verdict]:
    levels = _where(tables["auc"], protocol="single", detector="z")
    last = _last(levels)
    row = _where(levels, depth=0, negatives="both").sort_values("auc").iloc[0]
    claim = f"z before any paraphrase, pooled negatives: least AUC of all T ≥ 40 ({row['paraphraser']}, T = {row['T']})"
    yield _verdict(claim, row, "≥ 0.98", row["auc"] >= 0.98)
    row = _where(levels, depth=last, T=40, negatives="unwatermarked").sort_values("auc").iloc[0]
    claim = f"z after {last} rounds ({row['paraphraser']}), T = 40, un-watermarked negatives: AUC"
    yield _verdict(claim, row, "≤ 0.73", row["auc"] <= 0.73)
    steps = _where(tables["decay"], paraphraser=HARD, llm=MAIN, kind="watermarked")
    row = steps[steps["depth"] > 2].sort_values("step").iloc[-1]
    claim = f"{HARD}: largest change of mean z in one round after the second (round {row['depth']}, T = {row['T']})"
    yield Verdict(claim, float(row["step"]), float(row["step_stderr"]), "< 0", bool(row["step"] < 0), "ours")
    worst = tables["auc"][(tables["auc"]["paraphraser"] != "llm") & (tables["auc"]["T"] == 40)].sort_values("se").iloc[-1]
    claim = f"largest standard error at T = 40 ({worst['detector']}, {worst['protocol']}({worst['depth']}))"
    yield Verdict(claim, float(worst["se"]), None, "≤ 0.02", bool(worst["se"] <= 0.02), "ours")


def _on_the_method(tables: dict[str, pd.DataFrame]) -> Iterator[Verdict]:
    """PSS with the whole chain against z at its end, and against what sees the same texts, on the hard chain."""
    gaps = _where(tables["differences"], protocol="prefix", paraphraser=HARD)
    last = _last(gaps)
    for length, target in ((40, 0.08), (100, 0.05)):
        cell = _where(gaps, depth=last, T=length, negatives="both")
        row = _only(cell, detector=METHOD, versus="z")
        claim = f"PSS of depths 1–{last} minus z at depth {last}, T = {length}: AUC"
        wanted = f"≥ {target:g}, and above 0 with 95 %: {row['lo']:.3f} … {row['hi']:.3f}"
        holds = row["difference"] >= target and row["lo"] > 0
        yield _verdict(claim, row, wanted, holds, column="difference")
        yield _verdict(claim, row, "≥ 0.10", row["difference"] >= PAPER_GAIN, "paper", column="difference")
        for versus in SAME_TEXTS:
            row = _only(cell, detector=METHOD, versus=versus)
            claim = f"PSS minus {versus} on the same texts, depths 1–{last}, T = {length}: AUC"
            wanted = f"> 0 with 95 %: {row['lo']:.3f} … {row['hi']:.3f}"
            yield _verdict(claim, row, wanted, row["lo"] > 0, column="difference")
        for name in STRETCH:
            row = _only(cell, detector=name, versus="lr_z")
            claim = f"{name} minus lr_z on the same texts, depths 1–{last}, T = {length}: AUC"
            yield _verdict(claim, row, "≥ −0.01", row["difference"] >= -0.01, column="difference")
        alone = _where(tables["differences"], protocol="single", paraphraser=HARD, depth=last, T=length, negatives="both")
        row = _only(alone, detector="static+lr", versus="z")
        claim = f"one text alone, depth {last}, T = {length}: 21 features and a classifier minus z, AUC"
        wanted = f"> 0 with 95 %: {row['lo']:.3f} … {row['hi']:.3f}"
        yield _verdict(claim, row, wanted, row["lo"] > 0, column="difference")


def _on_transfer(moved: pd.DataFrame) -> Iterator[Verdict]:
    """Where domain, paraphraser and model all differ, as in the abstract."""
    away = _where(moved, differ=3, detector=METHOD)
    row = away.loc[away["auc"].idxmin()]
    claim = f"PSS, domain, paraphraser and model all differ, T = {row['T']}: least AUC of {len(away)} cells"
    yield _verdict(claim, row, "≥ 0.837", row["auc"] >= PAPER_TRANSFER, "paper")
    away = _where(away, test_domain="other two", test_paraphraser=HARD)
    away = _where(away, **dict(zip(("train_domain", "train_paraphraser", "train_llm"), SOURCE, strict=True)))
    for _, row in away.iterrows():
        claim = (
            f"PSS trained on {', '.join(SOURCE)}, tested on the other domains, {HARD}, {row['test_llm']}, T = {row['T']}: AUC"
        )
        yield _verdict(claim, row, "≥ 0.837", row["auc"] >= PAPER_TRANSFER, "paper")


def _on_controls(tables: dict[str, pd.DataFrame]) -> Iterator[Verdict]:
    controls = tables["controls"].set_index("control")
    wrong = controls.loc["wrong key"]
    off = ((wrong["auc"] - 0.5) / wrong["se"]).abs().max()
    claim = f"wrong key: largest distance of {len(wrong)} AUCs from 0.5, in standard errors"
    yield Verdict(claim, float(off), None, "≤ 3", bool(off <= 3), "ours")
    row = controls.loc["equal lengths"]
    holds = abs(row["auc"] - 0.5) <= 3 * row["se"]
    yield _verdict("no watermark anywhere, equal lengths: AUC", row, "0.5 ± 3 s.e.", holds)
    row = controls.loc["unequal lengths"]
    yield _verdict("no watermark anywhere, unequal lengths: AUC", row, "≥ 0.9", row["auc"] >= 0.9)
    iid = _where(tables["differences"], paraphraser="channel, iid", protocol="single", versus="z")
    off = (iid["difference"] / iid["se"].where(iid["se"] > 0, np.inf)).max()
    claim = f"independent synthetic bits, one text: largest lead over z of {len(iid)}, in standard errors"
    yield Verdict(claim, float(off), None, "≤ 3", bool(off <= 3), "ours")
    row = _where(tables["copy_paste"], detector="winmax", versus="z").sort_values("auc").iloc[-1]
    claim = f"{row['span']} watermarked tokens inside 200: WinMax minus z, AUC"
    yield _verdict(claim, row, f"> 0 with 95 %: {row['lo']:.3f} … {row['hi']:.3f}", row["lo"] > 0)


def _last(table: pd.DataFrame) -> int:
    return int(_where(table, paraphraser=HARD)["depth"].max())


def _only(table: pd.DataFrame, **labels) -> pd.Series:
    (row,) = (row for _, row in _where(table, **labels).iterrows())
    return row


# The build


STORED = ("auc", "differences", "transfer", "controls", "channel", "copy_paste", "decay")


def build(*, out: Path | None = None, fast: bool = False, recipe: Recipe | None = None) -> None:
    """Write texts, paraphrase them, measure everything and leave what `stored` and `load_corpus` read. Finished parts are kept.

    Args:
        out: folder of the build; None is the package's own `data/`.
        fast: six documents, to try the machinery; not for figures.
        recipe: sizes of one's own.

    Raises:
        ValueError: `out` holds a build with another recipe.
    """
    out = DATA if out is None else Path(out)
    recipe = recipe or (_FAST if fast else Recipe())
    claim(out, recipe, packages=("numpy", "scikit-learn", "xgboost-cpu", "torch", "transformers"))
    if not (out / "corpus.npz").is_file():
        build_parts(out, recipe.texts)
    once(out / "contexts.npz", _contexts)
    parts = out / "parts"
    if not all((out / f"{name}.csv.gz").is_file() for name in STORED):
        tables = _tables(_measure(load_corpus(out), recipe, parts)[0])
        for name in STORED:
            once(out / f"{name}.csv.gz", functools.partial(write_table, _rounded(tables[name])))
    shutil.rmtree(parts, ignore_errors=True)


def _contexts(path: Path) -> None:
    from labkit.watermark.contexts import build_contexts, save_contexts
    from labkit.watermark.generate import load  # brings torch

    save_contexts(build_contexts(*load(MAIN)), path)


def _rounded(table: pd.DataFrame) -> pd.DataFrame:
    """Four significant digits: more than sampling can tell."""
    return table.map(lambda value: float(f"{value:.4g}") if isinstance(value, float) else value)


def stored(name: str, data: Path = DATA) -> pd.DataFrame:
    """A table that `build` left. Errors `se` and 95 % intervals `lo`, `hi` are over documents.

    - "auc": `protocol`, `depth` (the number in the protocol), `detector`, `T`, `paraphraser`, `negatives`, `auc`.
    - "differences": AUC of `detector` minus that of `versus` on the same texts, `difference`; also of the synthetic channel.
    - "transfer": trained and tested on `domain`, `paraphraser`, `llm`; `differ` counts which of the three are not the same. The
      test domain "other two" is both that were not trained on.
    - "controls": `control` is "right key", "wrong key", "equal lengths", "unequal lengths" or "text only".
    - "channel": synthetic bits, `channel` is "iid" or "bursts"; "copy_paste": `span` watermarked tokens inside human text.
    - "decay": mean `z`, its change `step` since the depth before, bigram `survival`, by `paraphraser`, `llm`, `kind`, `depth`.
    """
    if name not in STORED:
        raise ValueError(f"name={name!r}: expected one of {', '.join(STORED)}")
    return _read(Path(data) / f"{name}.csv.gz").drop(columns="roc", errors="ignore")


@dataclass(frozen=True, eq=False)
class Roc:
    """ROC curves of the main tables, of scores averaged over cross-validations.

    Attributes:
        fpr: (F,) false positive rates, the same for all.
    """

    fpr: np.ndarray
    _curves: pd.Series

    def of(self, protocol: str, detector: str, T: int, paraphraser: str, depth: int, negatives: str = "both") -> np.ndarray:
        """True positive rates (F,) of a row of "auc".

        Raises:
            ValueError: this was not measured.
        """
        key = protocol, detector, T, paraphraser, depth, negatives
        if key not in self._curves.index:
            raise ValueError(f"no ROC of {key} is stored")
        return np.frombuffer(bytes.fromhex(self._curves[key]), np.uint8) / 255


def stored_roc(data: Path = DATA) -> Roc:
    """The ROC curves that `build` left."""
    table = _read(Path(data) / "auc.csv.gz")
    keys = ["protocol", "detector", "T", "paraphraser", "depth", "negatives"]
    return Roc(FPR, table.set_index(keys)["roc"].sort_index())
