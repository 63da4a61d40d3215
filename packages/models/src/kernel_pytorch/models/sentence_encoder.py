"""Sentence embeddings from folders of sentence-transformers, computed without padding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .bert import BertConfig, BertEncoder, Packed
from .segments import bag_sum, maximum
from .techniques import Names, TechniqueModule

WINDOW = 16384
"""Number of texts that are tokenised and sorted together, which bounds the memory."""

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 32768}
"""On a CPU the activations of a batch should fit in the caches; a GPU needs enough rows for each product."""

OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of older files, in the order in which their vectors are concatenated."""
MODES = tuple(OLD_FLAGS.values())


class SentenceEncoder(TechniqueModule):
    """Texts to vectors: tokeniser, BERT encoder, pooling, and normalisation if the folder says so.

    The tokens of a batch are packed one text after the other, so that no layer computes padding; attention stays within
    each text. Make it with `from_pretrained`.

    Args:
        encoder: of packed texts.
        tokenizer: a `tokenizers.Tokenizer`.
        modes: of `MODES`, the ways of pooling.
        normalize: whether vectors have length 1.
        max_seq_length: the most tokens of a text; the rest is cut off.
        lower: whether texts become lower case before the tokeniser.
        prompt: prepended to each text.

    Source: Reimers and Gurevych, "Sentence-BERT", 2019, https://arxiv.org/abs/1908.10084.
    """

    def __init__(
        self,
        encoder: BertEncoder,
        tokenizer: Any,
        modes: tuple[str, ...] = ("mean",),
        *,
        normalize: bool = False,
        max_seq_length: int | None = None,
        lower: bool = False,
        prompt: str = "",
    ) -> None:
        super().__init__(encoder.techniques.names, encoder.techniques.level)
        self.encoder, self.tokenizer, self.modes, self.normalize = encoder, tokenizer, modes, normalize
        self.lower, self.prompt = lower, prompt
        self.max_seq_length = min(max_seq_length or encoder.config.longest, encoder.config.longest)
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.max_seq_length)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        techniques: Names = None,
        level: str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> SentenceEncoder:
        """Read a folder of sentence-transformers: a BERT or RoBERTa network, pooling, maybe normalisation.

        Args:
            folder: with modules.json, config.json, model.safetensors and tokenizer.json; nothing is downloaded.
            dtype: dtype of the weights.

        Raises:
            FileNotFoundError: a file is missing; the message says how to get it. Pickled weights are not read.
            ImportError: safetensors or tokenizers is missing: the extra `sentence`.
            ValueError: a module, model type, activation or pooling is unknown, or weights are missing or left over.
        """
        try:
            from safetensors.torch import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("SentenceEncoder: pip install kernel-pytorch-models[sentence]") from error
        folder = Path(folder)
        network, pooling, normalize = _modules(folder)
        config = BertConfig.read(_read(network / "config.json"))
        encoder = BertEncoder(config, techniques, level)
        encoder.load_transformers(load_file(_weights(network)))
        options = _options(folder, network, pooling)
        tokenizer = Tokenizer.from_file(str(_existing(network / "tokenizer.json")))
        model = cls(encoder.to(dtype), tokenizer, read_modes(pooling), normalize=normalize, **options)
        return model.eval()

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self.encoder.config.hidden_size * len(self.modes)

    def forward(self, packed: Packed) -> Tensor:
        """Compute `(texts, dimension)`, not normalised; differentiable. float32, or float64 with float64 weights."""
        return pool_texts(self.encoder(packed), packed.cu_seqlens, self.modes)

    @torch.inference_mode()
    def encode(
        self, texts: Sequence[str], *, tokens_per_batch: int | None = None, normalize: bool | None = None
    ) -> Tensor:
        """Compute vectors `(texts, dimension)`, float32 (float64 with float64 weights), in the order of texts.

        The vector of a text depends on the other texts only by the rounding of matrix products.

        Args:
            texts: any number, of any lengths, in any order. An empty text has the tokeniser's special tokens.
            tokens_per_batch: the most tokens of a batch, unless one text has more; None for a default of the device.
            normalize: whether vectors have length 1; None for the setting of the folder.

        Raises:
            TypeError: texts is a single string.
            ValueError: tokens_per_batch is below 1.
        """
        if isinstance(texts, str):
            raise TypeError("texts: given a string; it must be a sequence of strings")
        weight = self.encoder.words.weight
        limit = TOKENS_PER_BATCH.get(weight.device.type, 32768) if tokens_per_batch is None else tokens_per_batch
        if limit < 1:
            raise ValueError(f"tokens_per_batch: given {limit}; it must be at least 1")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        vectors = torch.empty(len(texts), self.dimension, dtype=dtype, device=weight.device)
        for start in range(0, len(texts), WINDOW):
            tokens = self.tokenize(texts[start : start + WINDOW])
            for batch in batches([len(ids) for ids in tokens], limit):
                found = self(Packed.of([tokens[i] for i in batch], weight.device))
                vectors[torch.tensor(batch, device=weight.device) + start] = found
        wanted = self.normalize if normalize is None else normalize
        return F.normalize(vectors, dim=1) if wanted else vectors

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, cut to `max_seq_length`."""
        if self.prompt or self.lower:
            texts = [self.prompt + text for text in texts]
            texts = [text.lower() for text in texts] if self.lower else texts
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]


def batches(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Indices in the order of length, in groups of at most that many tokens; a longer text is a separate group."""
    found: list[list[int]] = []
    have = tokens_per_batch
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not found or have + lengths[i] > tokens_per_batch:
            found.append([])
            have = 0
        found[-1].append(i)
        have += lengths[i]
    return found


def _modules(folder: Path) -> tuple[Path, dict[str, Any], bool]:
    """Find the folder of the network, the config of pooling, and whether vectors are normalised."""
    modules = _read(folder / "modules.json")
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        named = ", ".join(module["type"] for module in modules)
        raise ValueError(f"modules.json: given {named}; known are Transformer, Pooling and then Normalize or nothing")
    pooling = _read(folder / modules[1]["path"] / "config.json")
    return folder / modules[0]["path"], pooling, len(kinds) == 3


def _options(folder: Path, network: Path, pooling: dict[str, Any]) -> dict[str, Any]:
    """Read the smaller files: the longest text, lower case, the prompt."""
    files = [network / "sentence_bert_config.json", network / "tokenizer_config.json"]
    files += [folder / "config_sentence_transformers.json"]
    sentence, tokenizer, whole = (_read(file) if file.exists() else {} for file in files)
    prompt = (whole.get("prompts") or {}).get(whole.get("default_prompt_name"), "")
    if prompt and not pooling.get("include_prompt", True):
        raise ValueError(f"include_prompt: given False beside the prompt {prompt!r}; a prompt is always pooled here")
    length = sentence.get("max_seq_length") or tokenizer.get("model_max_length")
    lower = bool(sentence.get("do_lower_case"))
    return {"max_seq_length": None if length is None else int(length), "lower": lower, "prompt": prompt}


def _weights(network: Path) -> Path:
    if not (network / "model.safetensors").exists() and (network / "pytorch_model.bin").exists():
        raise FileNotFoundError(
            f"{network} has pytorch_model.bin alone, a pickle, which may run code when it is read. If you trust it, "
            f"write the other format: transformers.AutoModel.from_pretrained({str(network)!r})"
            f".save_pretrained({str(network)!r})"
        )
    return _existing(network / "model.safetensors")


def _existing(file: Path) -> Path:
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: a folder that sentence-transformers wrote has it")
    return file


def _read(file: Path) -> Any:
    try:
        return json.loads(_existing(file).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error


def read_modes(config: dict[str, Any]) -> tuple[str, ...]:
    """The modes in the pooling config of sentence-transformers, in the order of their vectors.

    Newer files have `pooling_mode`, a name or a list; older ones a flag for each mode. ValueError: a mode is unknown.
    """
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = (named,) if isinstance(named, str) else tuple(named)
    else:
        flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_") and value}
        if unknown := sorted(flags.keys() - OLD_FLAGS.keys()):
            raise ValueError(f"pooling: given {', '.join(unknown)}; known are {', '.join(OLD_FLAGS)}")
        modes = tuple(mode for key, mode in OLD_FLAGS.items() if key in flags) or ("mean",)
    if unknown := [str(mode) for mode in modes if mode not in MODES]:
        raise ValueError(f"pooling_mode: given {', '.join(unknown)}; known are {', '.join(MODES)}")
    return modes


def pool_texts(x: Tensor, cu_seqlens: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Pool each text.

    Args:
        x: `(T, N)`, the tokens of all texts, one text after the other.
        cu_seqlens: `(B + 1,)` int32 or int64, where each text begins, and T. Texts may be empty.
        modes: of `MODES`; "weightedmean" weights a token by its position, counted from 1.

    Returns:
        `(B, N * len(modes))`, float32 (float64 for float64): sums in 16 bits lose digits. Zeros for empty texts.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    lengths = cu_seqlens.diff()
    found = [_pool(x, cu_seqlens.long(), lengths, mode) for mode in modes]
    return torch.where(lengths[:, None] == 0, 0.0, torch.cat(found, 1))


def _pool(x: Tensor, starts: Tensor, lengths: Tensor, mode: str) -> Tensor:
    tokens = torch.arange(x.shape[0], device=x.device)
    if mode in ("cls", "lasttoken") and x.shape[0]:
        places = starts[:-1] if mode == "cls" else starts[1:] - 1
        return x.index_select(0, places.clamp(0, x.shape[0] - 1))
    texts = torch.searchsorted(starts, tokens, right=True) - 1
    if mode == "max":
        return maximum(x, texts, lengths.shape[0])
    counts = lengths.clamp(min=1)[:, None].to(x.dtype)
    if mode == "weightedmean":
        x = x * (tokens - starts[texts] + 1).to(x.dtype)[:, None]
        counts = counts * (counts + 1) / 2
    # The rows of each text are added in their order: the bits do not depend on the other texts.
    return bag_sum(x, None, tokens, starts) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)
