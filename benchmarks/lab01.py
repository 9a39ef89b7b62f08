"""Lab 01: what skipping columns is worth, for one product and for a decoded token.

Peers: `torch.mv` on the ordinary row-major weight; our own kernel reading everything (p = 0), which isolates sparsity from
memory layout; transformers' `generate`. All on one thread.
"""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import nbformat
import numpy as np
import torch
from nbclient import NotebookClient
from transformers import PreTrainedModel

from benchmarks._runner import Row, compare, interleave, ratio_row
from labkit.corpora import documents, windows
from labkit.labs import LABS
from labkit.llm import load_lm
from labkit.sparsity.calibration import Calibration, calibrate
from labkit.sparsity.decoding import Decoder, lay_out, thread_count
from labkit.sparsity.kernels import sparse_gemv
from labkit.sparsity.sites import find_sites
from labkit.sparsity.sparsifier import SparseModel

WINDOW, PROMPT = 128, 64  # tokens per window, of which the prompt is read densely


def benchmarks() -> Iterator[Row]:
    """All comparisons of the lab: about three minutes of processor time and 2.5 GB."""
    yield from notebook_memory()
    with thread_count(1):
        yield from products()
        model, tokenizer = load_lm("smollm2")
        train = windows(tokenizer, documents("wiki", "train"), WINDOW, 16)
        test = windows(tokenizer, documents("wiki", "test"), WINDOW, 3)
        calibration = calibrate(model, train)
        yield from simulation(model, calibration, test[:1])
        yield from decoding(model, calibration, test)
        yield from generation(model, calibration, test[0, :PROMPT])


def products() -> Iterator[Row]:
    """One matrix-vector product, weights cycled so that none stays in a cache."""
    cases = (  # inputs, outputs, number of weights, targets against torch.mv, against p = 0
        (4096, 11008, 1, {0.5: "≥ 1.7", 0.7: "≥ 3", 0.9: "≥ 7"}, {0.5: "≥ 1.6", 0.7: "≥ 2.67", 0.9: "≥ 8"}),
        (576, 1536, 60, {0.5: "≥ 1.5", 0.7: "≥ 2.2"}, {}),
        (1536, 576, 60, {0.5: "≥ 1.5", 0.7: "≥ 2.2"}, {}),
    )
    for d, m, copies, against_mv, against_own in cases:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(d, generator=generator), torch.empty(m)
        rows = torch.randn(copies, m, d, generator=generator)  # row-major W
        columns = rows.transpose(1, 2).contiguous()
        taus = {p: float(x.abs().quantile(p)) if p else -1.0 for p in np.arange(10) / 10}

        def dense(rows=rows, x=x, y=y) -> None:
            for weight in rows:
                torch.mv(weight, x, out=y)

        def skip(tau: float, columns=columns, x=x, y=y) -> None:
            for weight in columns:
                sparse_gemv(x, weight, tau, out=y)

        calls = {"mv": dense} | {p: partial(skip, tau) for p, tau in taus.items()}
        seconds = {k: s / copies for k, s in interleave(calls, 15, progress=f"{d}→{m}").items()}
        sizes = f"{d}→{m} × {copies} = {rows.nbytes / 1e6:.0f} MB, float32"
        row = partial(compare, "01", sizes=sizes)
        for p in (0.3, 0.5, 0.7, 0.9):
            name = f"sparse_gemv at {p:.0%}"
            yield row(name, seconds[p], "torch.mv", seconds["mv"], target=against_mv.get(p))
            yield row(name, seconds[p], "sparse_gemv at 0%", seconds[0], target=against_own.get(p))
        if copies == 1:
            share, medians = 1 - np.array(list(taus)), [np.median(seconds[p]) for p in taus]
            linearity = np.corrcoef(share, medians)[0, 1] ** 2
            name = "R² of time over kept columns at 0…90%"
            yield ratio_row("01", name, linearity, "a straight line", target="≥ 0.98", sizes=sizes)


def simulation(model: PreTrainedModel, calibration: Calibration, ids: torch.Tensor) -> Iterator[Row]:
    """A whole-sequence forward pass with masks and spontaneous neurons simulated by hooks; nothing is skipped there."""
    alpha = {site: torch.full((site.width,), 1e-3) for site in find_sites(model)}
    seconds = {"dense": [], "wrapped": []}
    with torch.inference_mode():
        model(ids)
        for _ in range(15):
            seconds["dense"].append(_seconds(partial(model, ids)))
            with SparseModel(model, calibration, 0.5) as sparse:
                sparse.set_alpha(alpha)
                seconds["wrapped"].append(_seconds(partial(sparse, ids)))
    yield compare(
        "01",
        "forward pass of SparseModel at 50%",
        np.array(seconds["wrapped"]),
        "the dense model",
        np.array(seconds["dense"]),
        target="≥ 0.87",  # at most 1.15 times as long
        sizes=f"SmolLM2-135M, T = {ids.shape[1]}, float32",
    )


def decoding(model: PreTrainedModel, calibration: Calibration, texts: torch.Tensor) -> Iterator[Row]:
    """Decoding the same texts in one loop; the builds take turns at each position."""
    builds = _builds(model, calibration, capacity=texts.shape[1])
    seconds, kept = {key: [] for key in builds}, {key: [] for key in builds}
    parts = {key: [] for key in builds}

    def read_on(key: tuple, ids: torch.Tensor) -> None:
        decoder = builds[key]
        decoder.step(int(ids[decoder.position]))
        kept[key].append(decoder.kept.copy())

    for ids in texts:
        for decoder in builds.values():
            decoder.prefill(ids[:PROMPT])
        calls = {key: partial(read_on, key, ids) for key in builds}
        # one position is read uncounted, the last is kept for the profile
        for key, values in interleave(calls, len(ids) - PROMPT - 2, progress="decode").items():
            seconds[key].extend(values)
        for key, decoder in builds.items():
            parts[key].append(decoder.profile(int(ids[-1])))
    seconds = {key: np.array(values) for key, values in seconds.items()}

    text = f"SmolLM2-135M float32, {len(texts)} texts, positions {PROMPT + 1}…{texts.shape[1] - 2}"
    against_mv = {
        ("fp32", 0.5): "≥ 1.6",
        ("fp32", 0.7): "≥ 2.2",
        ("bf16", 0.5): "≥ 1.7",
        ("bf16", 0.7): "≥ 2.8",
    }
    against_own = {("fp32", 0.5): "≥ 1.35", ("fp32", 0.7): "≥ 1.8"}
    for head, p in against_mv:
        ours, own = seconds["skip", p, head], seconds["dense-own", 0.0, head]
        share, bound = _byte_bound(builds["skip", p, head], np.mean(kept["skip", p, head], axis=0), head)
        row = partial(compare, "01", f"decode at {p:.0%}, {head} head", ours)
        sizes = f"{text}, {share:.0%} of the weights read, byte bound {bound:.3g}"
        yield row("torch.mv", seconds["dense", 0.0, head], target=against_mv[head, p], sizes=sizes)
        yield row("own kernel at 0%", own, target=against_own.get((head, p)), sizes=sizes)
        excess = np.median(own / ours) / bound
        name = f"decode at {p:.0%}, {head} head, speed-up over 0%"
        yield ratio_row("01", name, excess, "its byte bound", target="≤ 1.1", sizes=sizes)
    for (kernel, p, head), profiles in parts.items():
        for part in profiles[0]:
            spent = np.array([profile[part] for profile in profiles])
            total = np.array([sum(profile.values()) for profile in profiles])
            name = f"{part} of {kernel} at {p:.0%}, {head} head"
            yield compare("01", name, spent, "the whole token", total, sizes=text)


def generation(model: PreTrainedModel, calibration: Calibration, prompt: torch.Tensor) -> Iterator[Row]:
    """Greedy continuation of a prompt, prefill subtracted; much of the gain over `generate` is the lean loop."""
    new = 32
    builds = _builds(model, calibration, capacity=len(prompt) + new)

    def generate(count: int) -> None:
        model.generate(prompt[None], min_new_tokens=count, max_new_tokens=count, do_sample=False)

    def continue_greedily(key: tuple, count: int) -> None:
        decoder, token = builds[key], int(prompt[-1])
        decoder.prefill(prompt[:-1])
        for _ in range(count):
            token = int(decoder.step(token).argmax())

    calls = {("generate", count): partial(generate, count) for count in (1, new + 1)}
    calls |= {(key, count): partial(continue_greedily, key, count) for key in builds for count in (1, new + 1)}
    seconds = interleave(calls, 5, progress="generate")
    per_token = {key: (seconds[key, new + 1] - seconds[key, 1]) / new for key in ("generate", *builds)}
    sizes = f"SmolLM2-135M float32, {new} greedy tokens after {len(prompt)}"
    for kernel, p, head in builds:
        ours = per_token[kernel, p, head]
        yield compare(
            "01",
            f"{kernel} at {p:.0%}, {head} head, {1 / np.median(ours):.0f} tokens/s",
            ours,
            f"transformers' generate, {1 / np.median(per_token['generate']):.0f} tokens/s",
            per_token["generate"],
            sizes=sizes,
        )


def notebook_memory() -> Iterator[Row]:
    """Peak memory of the kernel that runs the lab's notebook in fast mode; Linux only."""
    notebook = LABS["01"].notebook
    if notebook is None or sys.platform != "linux":
        return
    content = nbformat.read(notebook, as_version=4)
    probe = "print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    content.cells.append(nbformat.v4.new_code_cell(probe))
    NotebookClient(content, timeout=600, resources={"metadata": {"path": notebook.parent}}).execute()
    peak = int(content.cells[-1].outputs[0].text.split()[1]) * 1024 / 1e9  # "VmHWM:  … kB"
    yield ratio_row(
        "01",
        f"{notebook.name}, fast: kernel of {peak:.2f} GB",
        1.2 / peak,
        "1.2 GB",
        target="≥ 1",
        sizes="peak resident memory",
    )


def _builds(model: PreTrainedModel, calibration: Calibration, capacity: int) -> dict[tuple, Decoder]:
    """Decoders by (kernel, sparsity, head); builds with the same layout share their weights."""
    rows, columns = lay_out(model, transposed=False), lay_out(model, transposed=True)
    builds = {}
    with SparseModel(model, calibration, 0.0) as sparse:
        for head in ("fp32", "bf16"):
            for kernel, p in (("dense", 0.0), ("dense-own", 0.0), ("skip", 0.5), ("skip", 0.7)):
                sparse.set_sparsity(p)
                weights = rows if kernel == "dense" else columns
                builds[kernel, p, head] = Decoder(model, sparse, capacity, kernel=kernel, head=head, weights=weights)
    return builds


def _byte_bound(decoder: Decoder, kept: np.ndarray, head: str) -> tuple[float, float]:
    """Share of the blocks' weights that was read, and dense over sparse bytes of a token, its head included."""
    weights = decoder.weights
    size = np.array([[weight.nbytes for weight in block] for block in weights.joined])  # (L, 4)
    tail = weights.head.nbytes / (1 if head == "fp32" else 2)
    read = float((kept * size).sum())
    return read / size.sum(), (size.sum() + tail) / (read + tail)


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start
