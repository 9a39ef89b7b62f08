"""Causal language models by name, path or GGUF file, ready to use with no network.

The default is SmolLM2-135M-Instruct, which arrives as a 4-bit GGUF asset. transformers can read a GGUF file, but slowly, and it
cannot save a model loaded that way. So the first call converts the file once, in a child process, into an ordinary
safetensors folder in the asset cache; every later call reads that folder in a few seconds.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from labkit import assets
from labkit.errors import MissingDependency

BUNDLED = ("smollm2", "gemma3-270m")  # asset names that `load_lm` takes in place of a path


def load_lm(
    source: str | os.PathLike = "smollm2",
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype = torch.float32,
    cache: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer in evaluation mode with frozen weights.

    Args:
        source: a bundled name ("smollm2", "gemma3-270m"), a .gguf file, a local transformers folder, or a hub id.
        gguf_file: file name inside the folder `source` when that folder holds GGUF files.
        dtype: floating-point type of the weights.
        cache: keep the converted copy of a GGUF file in the asset cache (4 bytes per parameter). With False the file is read
            anew each time (tens of seconds) and the model cannot be saved.

    Raises:
        FileNotFoundError: the path does not exist, or the hub id cannot be reached.
        MissingDependency: a GGUF file was given and `accelerate` or `gguf` is not installed.
        ValueError: the GGUF file is damaged or of an architecture that transformers does not read.
    """
    _return_freed_memory()
    path = _gguf_path(source, gguf_file)
    if path is None:
        folder = _folder_or_hub_id(source)
    elif cache:
        folder = prepare(path)
    else:
        _require_gguf_reader()
        try:
            return _read_gguf(path, dtype)
        except Exception as error:  # whatever the reader ran into
            raise ValueError(f"cannot read {path} as a GGUF language model: {error}") from error
    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(folder)
    except OSError as error:
        raise FileNotFoundError(
            f"source={os.fspath(source)!r} is neither one of {BUNDLED}, a local model folder, a .gguf file nor a hub id "
            f"that can be reached: {str(error).splitlines()[0]}"
        ) from error
    return _frozen(model), tokenizer


def prepare(source: str | os.PathLike = "smollm2") -> Path:
    """Convert a GGUF model into a safetensors folder in the asset cache unless that has been done; return the folder.

    The folder's name is the hash of the file, so an edited file is converted anew. The conversion runs in a child process:
    it needs 1.2 GB for SmolLM2 (2.7 GB for Gemma), which the calling process should not have to keep.
    """
    path = _gguf_path(source, None)
    if path is None:
        raise ValueError(f"source={os.fspath(source)!r} must be a .gguf file or one of {BUNDLED}")
    _require_gguf_reader()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    folder = assets.cache_root() / "converted" / f"{path.stem}-{digest}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():  # another process was faster
            return folder
        work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".partial-"))
        fresh = work / "model"  # made by the child: a temporary folder itself is private, the cache may be shared
        try:
            done = subprocess.run([sys.executable, "-m", "labkit.llm", str(path), str(fresh)], capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["the converter was killed (out of memory?)"])[-1]
                raise ValueError(f"cannot read {path} as a GGUF language model: {reason}")
            fresh.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def check_inputs(model: PreTrainedModel, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Check token ids (B, T), or input embeddings (B, T, d), against a model; return them as its keyword argument.

    Raises:
        ValueError: not two- or three-dimensional, empty or one-token windows, an id outside the vocabulary, or a window longer
            than the model's positions.
    """
    config = model.config
    if inputs.is_floating_point():
        if inputs.dim() != 3 or inputs.shape[2] != config.hidden_size:
            raise ValueError(f"inputs of shape {tuple(inputs.shape)}: embeddings must be (B, T, {config.hidden_size})")
    elif inputs.dim() != 2:
        raise ValueError(f"input_ids of shape {tuple(inputs.shape)}: token ids must be (B, T)")
    batch, length = inputs.shape[:2]
    if batch < 1 or length < 2:
        raise ValueError(f"input_ids of shape {tuple(inputs.shape)}: a window needs at least 2 tokens, or none has a next one")
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(f"input_ids have T={length} tokens, but the model has positions for {limit}")
    if inputs.is_floating_point():
        return {"inputs_embeds": inputs}
    if inputs.min() < 0 or inputs.max() >= config.vocab_size:
        raise ValueError(
            f"input_ids hold tokens {int(inputs.min())} … {int(inputs.max())}: ids must lie in 0 … {config.vocab_size - 1}"
        )
    return {"input_ids": inputs}


def fingerprint(model: PreTrainedModel) -> str:
    """Short hash of a model's architecture and size: equal for two copies of one model, different for two models."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in _VOLATILE}
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters() if not name.endswith(".bias")]
    text = json.dumps([config, shapes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_VOLATILE = ("dtype", "torch_dtype", "transformers_version", "architectures", "use_cache", "quantization_config")


def _gguf_path(source: str | os.PathLike, gguf_file: str | None) -> Path | None:
    if isinstance(source, str) and source in BUNDLED:
        return assets.path(source)
    path = Path(source).expanduser()
    if gguf_file is not None:
        path = path / gguf_file
    elif path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise FileNotFoundError(f"source={str(path)!r}: no such GGUF file")
    return path


def _folder_or_hub_id(source: str | os.PathLike) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"source={str(path)!r} is a folder without config.json, so not a transformers model")
        return str(path)
    return os.fspath(source)


def _require_gguf_reader() -> None:
    for package in ("accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(f'reading a GGUF file needs {package}: run  pip install "labkit[llm]"')


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return _frozen(model), tokenizer


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' weight-loading bar, which lasts a second and would be compared as a notebook's output."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _return_freed_memory() -> None:
    """Have glibc hand freed blocks above 1 MB back at once: one tensor of logits is 25 MB, and a class shares the machine."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def _frozen(model: PreTrainedModel) -> PreTrainedModel:
    return model.eval().requires_grad_(False)


def _convert(path: Path, folder: Path) -> None:
    """Rebuild the model without its quantisation record, the only way to make a GGUF-loaded model saveable."""
    model, tokenizer = _read_gguf(path, torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    clean = type(model)(type(model.config)(**config))
    clean.load_state_dict(model.state_dict(), strict=True)
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # which safetensors makes private
        weights.chmod((folder / "config.json").stat().st_mode)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
