"""The real all-MiniLM-L6-v2, reading real text, with every LayerNorm replaced."""

import copy

import pytest
import torch

from kernel_pytorch.fused_ln_act.replacements import replacements
from kernel_pytorch.harness.real_input import RealInputUnavailable, _library, _model_folder, real_text

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    """Tokenizer and network, as the harness loads them."""
    try:
        folder, transformers = _model_folder(), _library("transformers")
    except RealInputUnavailable as reason:
        pytest.skip(str(reason))
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer, transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()


def embeddings(tokenizer, network, texts):
    """Mean over the tokens, as sentence-transformers takes it."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    with torch.inference_mode():
        hidden = network(**batch).last_hidden_state
    return (hidden * mask).sum(1) / mask.sum(1)


def replaced(network, level):
    """A copy with a drop-in for every LayerNorm, and how many there were."""
    network, count = copy.deepcopy(network), 0
    (entry,) = [entry for entry in replacements() if entry["stock"] is torch.nn.LayerNorm]
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if entry["applies"](child) is None if isinstance(child, torch.nn.LayerNorm) else False:
                ours = entry["build"](child)
                ours.level = level
                setattr(parent, name, ours)
                count += 1
    return network, count


@pytest.mark.parametrize("level", [None, "triton"])
def test_embeddings_stay_the_same(model, level):
    tokenizer, network = model
    texts = real_text(4)
    ours, count = replaced(network, level)
    assert count == 13
    expected, found = embeddings(tokenizer, network, texts), embeddings(tokenizer, ours, texts)
    assert torch.nn.functional.cosine_similarity(expected, found).min() > 0.99999
    # Texts are not all alike to the model, so equal embeddings mean something.
    assert torch.nn.functional.cosine_similarity(expected[0], expected[1], dim=0) < 0.9
