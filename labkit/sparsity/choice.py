"""Multiple-choice accuracy on BIG-bench tasks: which answer does the model find most likely after the question?

An answer's score is the sum of log-probabilities of its tokens; the length-normalised variant divides by their number. The
answers are not listed in the question. Each question is run once and its answers continue from the cached prefix, which
token-local sparsity leaves exact.
"""

import copy
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit.sparsity.sparsifier import SparseModel


@dataclass(frozen=True)
class McqResult:
    """Outcome per item: `correct` (N,) by summed log-probability, `correct_normalised` (N,) per token, and the chance level."""

    correct: torch.Tensor
    correct_normalised: torch.Tensor
    chance: float

    @property
    def accuracy(self) -> float:
        """Share of items answered correctly."""
        return float(self.correct.mean())

    @property
    def stderr(self) -> float:
        """Standard error of the accuracy."""
        return float(self.correct.std() / math.sqrt(len(self.correct)))

    def __repr__(self) -> str:
        return f"McqResult({self.accuracy:.3f} ± {self.stderr:.3f} on {len(self.correct)} items, chance {self.chance:.3f})"


def mcq_accuracy(
    model: PreTrainedModel | SparseModel,
    tokenizer: PreTrainedTokenizerBase,
    task_json: str | os.PathLike,
    limit: int | None = None,
    *,
    progress: bool = False,
) -> McqResult:
    """Score a model on a BIG-bench JSON task.

    Args:
        model: dense or sparse.
        task_json: a task file whose examples carry `input` and `target_scores` (answer -> 1 if right, else 0).
        limit: number of items, spread evenly over the file so that every model sees the same; None takes all.
        progress: show a bar.

    Raises:
        ValueError: the task has no `target_scores`, or fewer than two items are asked for.
    """
    items = list(_items(Path(task_json)))
    limit = len(items) if limit is None else min(limit, len(items))
    if limit < 2:
        raise ValueError(f"limit={limit}: at least two items are needed for a standard error")
    chosen = [items[i] for i in torch.linspace(0, len(items) - 1, limit).round().int().tolist()]
    summed, normalised, chance = [], [], []
    for question, answers, right in tqdm(chosen, desc=Path(task_json).parent.name, unit="item", disable=not progress):
        scores, lengths = _answer_scores(model, tokenizer, question, answers)
        summed.append(int(scores.argmax()) in right)
        normalised.append(int((scores / lengths).argmax()) in right)
        chance.append(len(right) / len(answers))
    return McqResult(torch.tensor(summed).double(), torch.tensor(normalised).double(), sum(chance) / len(chance))


def _items(path: Path) -> Iterator[tuple[str, list[str], set[int]]]:
    task = json.loads(path.read_text(encoding="utf-8"))
    examples = task.get("examples", [])
    if not examples or any("target_scores" not in example for example in examples):
        raise ValueError(f"task_json={str(path)!r}: expected examples with 'target_scores'; is it a multiple-choice task?")
    lead = task.get("task_prefix", "") + task.get("example_input_prefix", "\nQ: ")
    join = task.get("example_output_prefix", "\nA: ")
    for example in examples:
        answers = list(example["target_scores"])
        best = max(example["target_scores"].values())
        right = {i for i, answer in enumerate(answers) if example["target_scores"][answer] == best}
        yield f"{lead}{example['input']}{join}".strip(), answers, right


@torch.inference_mode()
def _answer_scores(
    model: PreTrainedModel | SparseModel, tokenizer: PreTrainedTokenizerBase, question: str, answers: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed log-probability (K,) and number of tokens (K,) of each answer."""
    prefix = tokenizer(question, return_tensors="pt")["input_ids"]  # (1, P)
    pieces = [tokenizer(" " + answer, add_special_tokens=False, return_tensors="pt")["input_ids"][0] for answer in answers]
    lengths = torch.tensor([len(piece) for piece in pieces])
    out = model(input_ids=prefix, use_cache=True)
    cache = copy.deepcopy(out.past_key_values)
    cache.batch_repeat_interleave(len(answers))
    padded = pad_sequence(pieces, batch_first=True)  # (K, L); causal attention never lets a real token see the padding
    more = model(input_ids=padded, cache=cache, use_cache=True).logits
    first = out.logits[:, -1:].expand(len(answers), -1, -1)
    log_probs = torch.cat((first, more[:, :-1]), dim=1).log_softmax(-1)  # (K, L, V)
    token = log_probs.gather(-1, padded[..., None])[..., 0]
    real = torch.arange(padded.shape[1]) < lengths[:, None]
    return (token * real).sum(1), lengths
