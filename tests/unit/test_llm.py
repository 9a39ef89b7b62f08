import importlib.util
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from labkit import llm
from labkit.errors import MissingDependency
from labkit.llm import check_inputs, fingerprint, load_lm, prepare

WIDTH, BLOCKS, VOCABULARY = 32, 2, 260


def write_gguf(path, architecture="llama", seed=0):
    """A random Llama of two blocks with a byte-level tokenizer; returns its weights by GGUF name."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "he"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    block = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (16, WIDTH),
        "attn_v": (16, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (48, WIDTH),
        "ffn_up": (48, WIDTH),
        "ffn_down": (WIDTH, 48),
        "attn_norm": (WIDTH,),
        "ffn_norm": (WIDTH,),
    }
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(BLOCKS) for name, shape in block.items()}
    weights = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A GGUF file, its weights, and the cache folder in which it was converted by a real child process."""
    folder = tmp_path_factory.mktemp("gguf")
    weights = write_gguf(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_ASSETS", str(folder / "cache"))
        prepare(folder / "tiny.gguf")
    return folder / "tiny.gguf", weights, folder / "cache"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_ASSETS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "other.gguf", seed=1)
    return tmp_path / "other.gguf"


def refuse_to_run(*_args, **_options):
    raise AssertionError("a child process was started")


def use(converted, monkeypatch):
    file, weights, folder = converted
    monkeypatch.setenv("LABKIT_ASSETS", str(folder))
    monkeypatch.setattr(subprocess, "run", refuse_to_run)
    return file, weights


def test_a_gguf_file_is_converted_once_and_then_read_from_the_cache(converted, monkeypatch):
    file, weights = use(converted, monkeypatch)
    model, tokenizer = load_lm(file)
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    embedding = torch.from_numpy(weights["token_embd"])
    torch.testing.assert_close(model.get_input_embeddings().weight, embedding, rtol=0, atol=0)
    down = torch.from_numpy(weights["blk.1.ffn_down"])
    torch.testing.assert_close(model.model.layers[1].mlp.down_proj.weight, down, rtol=0, atol=0)
    text = "hello, “wörld”\t– ok"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("he")["input_ids"]) == 1


def test_the_converted_model_is_the_one_in_the_file(converted, monkeypatch):
    file, _ = use(converted, monkeypatch)
    cached, _ = load_lm(file)
    read, _ = load_lm(file, cache=False)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(cached(ids).logits, read(ids).logits, rtol=0, atol=1e-6)
    assert fingerprint(cached) == fingerprint(read)


def test_a_converted_model_can_be_saved_and_loaded_as_a_folder(converted, monkeypatch, tmp_path):
    file, _ = use(converted, monkeypatch)
    model, tokenizer = load_lm(file)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    again, reread = load_lm(tmp_path / "model", dtype=torch.float64)
    assert again.dtype == torch.float64
    assert fingerprint(again) == fingerprint(model)
    assert reread("hello")["input_ids"] == tokenizer("hello")["input_ids"]


def test_a_folder_and_the_name_of_a_file_in_it(converted, monkeypatch):
    file, _ = use(converted, monkeypatch)
    model, _ = load_lm(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_others_may_read_a_shared_cache(converted):
    file, _, folder = converted
    (model,) = (folder / "converted").glob("tiny-*/")
    reference = folder / "probe"
    reference.mkdir()
    assert model.stat().st_mode == reference.stat().st_mode
    assert {path.stat().st_mode for path in model.iterdir()} == {(model / "config.json").stat().st_mode}
    assert (model / "config.json").stat().st_mode & 0o044 == file.stat().st_mode & 0o044


def test_an_edited_file_is_converted_anew(cache, file, monkeypatch):
    converted = []

    def convert(command, **_options):
        converted.append(command[-1])
        (folder := Path(command[-1])).mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", convert)
    first = prepare(file)
    assert prepare(file) == first
    file.write_bytes(file.read_bytes() + b"\0")
    assert prepare(file) != first
    assert len(converted) == 2
    assert sorted(path.name for path in (cache / "converted").iterdir() if path.is_dir()) == sorted(
        path.name for path in (first, prepare(file))
    )


def test_a_failed_conversion_leaves_nothing_behind(cache, file, monkeypatch):
    def convert(command, **_options):
        folder = Path(command[-1])
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        return subprocess.CompletedProcess(command, -9, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", convert)
    with pytest.raises(ValueError, match=r"cannot read .*other\.gguf.*the converter was killed \(out of memory\?\)"):
        prepare(file)
    assert [path for path in (cache / "converted").iterdir() if path.is_dir()] == []


def test_one_process_converts_while_others_wait(cache, file, monkeypatch):
    def convert(command, **_options):
        (lock,) = (cache / "converted").glob("*.lock")
        with pytest.raises(Timeout):
            FileLock(lock, timeout=0).acquire()
        assert not list((cache / "converted").glob("other-*/"))  # nothing to be seen before it is whole
        Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", convert)
    folder = prepare(file)
    with FileLock(folder.with_suffix(".lock"), timeout=0):
        assert folder.is_dir()


def test_who_waited_takes_what_the_other_converted(cache, file, monkeypatch):
    class Waited(FileLock):
        def __enter__(self):
            Path(self.lock_file).with_suffix("").mkdir()
            return super().__enter__()

    monkeypatch.setattr(llm, "FileLock", Waited)
    monkeypatch.setattr(subprocess, "run", refuse_to_run)
    assert prepare(file).is_dir()


def test_a_damaged_file_is_named_with_the_reason(cache, file):
    file.write_bytes(file.read_bytes()[:3000])
    message = r"cannot read .*other\.gguf as a GGUF language model: .*buffer"
    with pytest.raises(ValueError, match=message):
        load_lm(file)  # the reason comes from the child process
    with pytest.raises(ValueError, match=message):
        load_lm(file, cache=False)
    assert [path for path in (cache / "converted").iterdir() if path.is_dir()] == []


def test_an_unsupported_architecture_is_named(tmp_path):
    write_gguf(tmp_path / "odd.gguf", "abacus")
    with pytest.raises(ValueError, match=r"cannot read .*odd\.gguf .*architecture abacus is not supported"):
        load_lm(tmp_path / "odd.gguf", cache=False)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("package", ["accelerate", "gguf"])
def test_a_missing_reader_is_named_with_the_command(cache, file, monkeypatch, package, cached):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find_spec(name, *a))
    with pytest.raises(MissingDependency, match=rf'reading a GGUF file needs {package}: run  pip install "labkit\[llm\]"'):
        load_lm(file, cache=cached)


@pytest.mark.parametrize("name", ["missing.gguf", "missing.bin"])
def test_a_missing_gguf_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=rf"source='.*{name}': no such GGUF file"):
        load_lm(tmp_path, gguf_file=name)
    if name.endswith(".gguf"):
        with pytest.raises(FileNotFoundError, match=rf"source='.*{name}': no such GGUF file"):
            load_lm(tmp_path / name)


def test_only_gguf_files_are_prepared(tmp_path):
    with pytest.raises(ValueError, match=r"must be a \.gguf file or one of"):
        prepare(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is a folder without config\.json"):
        load_lm(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
    LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load_lm(tmp_path)


@pytest.mark.parametrize("source", ["some-owner/some-model", "no model at all", "/no/such/folder"])
def test_a_hub_id_out_of_reach_is_named(monkeypatch, source):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=rf"source='{source}' is neither one of .* nor a hub id that can be reached"):
        load_lm(source)


def tiny(**changes):
    config = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config |= {"max_position_embeddings": 16} | changes
    return LlamaForCausalLM(LlamaConfig(**config))


def test_the_fingerprint_tells_architectures_apart_and_copies_not():
    model = tiny()
    assert fingerprint(tiny()) == fingerprint(model) == fingerprint(tiny().double())
    changes = [{"num_hidden_layers": 3}, {"hidden_size": 16}, {"vocab_size": 51}, {"rope_theta": 7.0}, {"hidden_act": "gelu"}]
    assert len({fingerprint(model), *(fingerprint(tiny(**change)) for change in changes)}) == 6
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(50))  # as absorbed neurons add one
    assert fingerprint(model) == fingerprint(tiny())


def test_token_ids_and_embeddings_pass_the_check():
    model, ids = tiny(), torch.tensor([[0, 49, 3]])
    assert check_inputs(model, ids)["input_ids"] is ids
    states = torch.zeros(1, 3, 8)
    assert check_inputs(model, states)["inputs_embeds"] is states


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"input_ids of shape \(3,\): token ids must be \(B, T\)"),
        (torch.zeros(1, 3), r"inputs of shape \(1, 3\): embeddings must be \(B, T, 8\)"),
        (torch.zeros(1, 3, 7), r"inputs of shape \(1, 3, 7\): embeddings must be \(B, T, 8\)"),
        (torch.zeros(0, 3, dtype=torch.long), r"shape \(0, 3\): a window needs at least 2 tokens"),
        (torch.zeros(2, 1, dtype=torch.long), r"shape \(2, 1\): a window needs at least 2 tokens"),
        (torch.zeros(2, 0, dtype=torch.long), r"shape \(2, 0\): a window needs at least 2 tokens"),
        (torch.zeros(1, 17, dtype=torch.long), "T=17 tokens, but the model has positions for 16"),
        (torch.tensor([[0, 50]]), "tokens 0 … 50: ids must lie in 0 … 49"),
        (torch.tensor([[-1, 4]]), "tokens -1 … 4: ids must lie in 0 … 49"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_named(inputs, message):
    with pytest.raises(ValueError, match=message):
        check_inputs(tiny(), inputs)


def test_the_bundled_model_knows_the_capital_of_france():
    model, tokenizer = load_lm("smollm2")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = "Café – “naïve”,\tdéjà vu"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] != tokenizer.bos_token_id
    prompt = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(prompt).logits[0, -1].argmax()) == " Paris"
