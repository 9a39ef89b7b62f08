import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from labkit.sparsity.calibration import calibrate
from labkit.sparsity.choice import McqResult, mcq_accuracy
from labkit.sparsity.sparsifier import SparseModel

WORDS = ["?", "Q:", "A:", *"which is the capital of france spain paris madrid lyon new york city a b c d".split()]
EXAMPLES = [
    {"input": "which is the capital of france ?", "target_scores": {"paris": 1, "lyon": 0, "new york": 0}},
    {"input": "which city is of spain ?", "target_scores": {"paris": 0, "the city of madrid": 1}},
    {"input": "which is a ?", "target_scores": {"a": 1, "b c d": 0, "a b": 0, "lyon": 0}},
    {"input": "which is the city ?", "target_scores": {"new york city": 1, "york": 0, "madrid": 1}},
]


@pytest.fixture(scope="module")
def tokenizer():
    model = WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?")
    words = Tokenizer(model)
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.fixture
def task(tmp_path):
    """Writes a task file."""

    def write(examples=EXAMPLES, **fields):
        file = tmp_path / "task.json"
        file.write_text(json.dumps(fields | {"examples": examples}), encoding="utf-8")
        return file

    return write


def reference_scores(model, tokenizer, question, answers):
    """Summed log-probability and length of each answer, from one uncached pass over question and answer."""
    scores, lengths = [], []
    for answer in answers:
        prefix, suffix = (tokenizer(text)["input_ids"] for text in (question, answer))
        logits = model(torch.tensor([prefix + suffix])).logits[0].log_softmax(-1)
        scores.append(sum(float(logits[len(prefix) - 1 + i, token]) for i, token in enumerate(suffix)))
        lengths.append(len(suffix))
    return scores, lengths


def argmax(values):
    return max(range(len(values)), key=values.__getitem__)


@pytest.mark.parametrize("sparsity", [None, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_chosen_answer_is_the_likeliest_after_the_question(tiny, ids, tokenizer, task, sparsity, seed, request):
    model = tiny(seed=seed)
    subject = model
    if sparsity:
        subject = SparseModel(model, calibrate(model, ids), sparsity, dense_prefix=2)
        request.addfinalizer(subject.unwrap)
    result = mcq_accuracy(subject, tokenizer, task())
    for example, correct, normalised in zip(EXAMPLES, result.correct, result.correct_normalised, strict=True):
        answers = list(example["target_scores"])
        scores, lengths = reference_scores(subject, tokenizer, f"Q: {example['input']} A:", answers)
        assert correct == example["target_scores"][answers[argmax(scores)]]
        per_token = [score / length for score, length in zip(scores, lengths, strict=True)]
        assert normalised == example["target_scores"][answers[argmax(per_token)]]


def test_chance_is_the_mean_share_of_right_answers(model, tokenizer, task):
    result = mcq_accuracy(model, tokenizer, task())
    assert result.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 4 + 2 / 3) / 4)


def test_a_limit_takes_items_spread_over_the_file(model, tokenizer, task):
    everything = mcq_accuracy(model, tokenizer, task()).correct.tolist()
    for limit in (4, 99):
        assert mcq_accuracy(model, tokenizer, task(), limit).correct.tolist() == everything
    assert mcq_accuracy(model, tokenizer, task(), 2).correct.tolist() == [everything[0], everything[-1]]


def test_prefixes_of_the_task_frame_the_question(model, tokenizer, task):
    heard = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: heard.append(kwargs["input_ids"][0]), with_kwargs=True)
    file = task(EXAMPLES[:2], task_prefix="the city", example_input_prefix=" a ", example_output_prefix=" b")
    mcq_accuracy(model, tokenizer, file)
    handle.remove()
    assert tokenizer.decode(heard[0]) == "the city a which is the capital of france ? b"


def test_accuracy_has_its_standard_error():
    correct = torch.tensor([1.0, 0, 0, 1, 1])
    result = McqResult(correct, correct, 0.25)
    assert result.accuracy == pytest.approx(0.6)
    assert result.stderr == pytest.approx(math.sqrt(0.6 * 0.4 / 4))  # unbiased variance over n
    assert repr(result) == "McqResult(0.600 ± 0.245 on 5 items, chance 0.250)"


@pytest.mark.parametrize("examples", [[], [{"input": "a", "target": "b"}], [EXAMPLES[0], {"input": "a"}]])
def test_a_task_without_target_scores_is_refused(model, tokenizer, task, examples):
    with pytest.raises(ValueError, match=r"task_json='.*task\.json': expected examples with 'target_scores'"):
        mcq_accuracy(model, tokenizer, task(examples))


@pytest.mark.parametrize("limit", [-1, 0, 1])
def test_one_item_has_no_standard_error(model, tokenizer, task, limit):
    with pytest.raises(ValueError, match=f"limit={limit}: at least two items"):
        mcq_accuracy(model, tokenizer, task(), limit)
