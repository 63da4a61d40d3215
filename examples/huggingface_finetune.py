"""Fine-tune a Hugging Face model that is patched, with its own Trainer and with LoRA adapters of peft.

After reading it you can add this project to an existing fine-tuning script in five lines, and check that losses,
checkpoints and adapters are those of the stock model.

Needs: transformers, accelerate and peft (`pip install transformers accelerate peft`). No download: the model is small
and starts from random weights, the data is the source text of Python's standard library, as bytes. Half a minute on two
cores with `--quick`. On a GPU the model has the widths of Llama 3.2 1B and trains in bfloat16, and is compared with
Liger-Kernel if that is installed. Run: `python examples/huggingface_finetune.py --quick`. The last line says "same
losses".
"""

# %% The five lines
# Patch after the model is made or loaded, before it is wrapped (compiled, sharded) and before the Trainer gets it.
# --8<-- [start:patch]
from __future__ import annotations

import argparse
import copy
import importlib.util
import multiprocessing
import statistics
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch import flash_attn_triton, fused_ln_act, linear_cross_entropy, qkv_fusion, rmsnorm


def patched(model: torch.nn.Module) -> torch.nn.Module:
    """The model, patched by every technique."""
    for package in (rmsnorm, fused_ln_act, qkv_fusion, flash_attn_triton, linear_cross_entropy):
        print(package.patch(model))
    return model


# --8<-- [end:patch]
# %% Data and model
# Bytes are tokens, so no tokenizer is needed. The labels are the inputs: the model shifts them.
ROUNDS = 3


def examples(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """`count` pieces of `length` bytes of the standard library."""
    found: list[dict[str, torch.Tensor]] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()
        for piece in tokens.split(length):
            if len(piece) == length:
                found.append({"input_ids": piece, "labels": piece})
            if len(found) == count:
                return found
    raise RuntimeError(f"the standard library has only {len(found)} pieces of {length} bytes")


def stock(gpu: bool) -> torch.nn.Module:
    """A Llama at random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    if gpu:  # Llama 3.2 1B, with fewer layers and with bytes for a vocabulary
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=4 if gpu else 2, **sizes))


# %% Training
# Each run has a new Trainer with the same seed, so it sees the same batches. The variants take turns, and the
# first steps of each run are not counted.
@dataclass
class Run:
    """Losses of each step, and seconds of the counted ones."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train(model: torch.nn.Module, data: list[dict[str, torch.Tensor]], steps: int, folder: Path, **options: Any) -> Run:
    """Train with the Trainer of transformers."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    gpu, run = torch.cuda.is_available(), Run()

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.seconds.append(now() - self.start)

        def on_log(self, _: Any, __: Any, ___: Any, logs: dict[str, float], **____: Any) -> None:
            run.losses += [logs["loss"]] if "loss" in logs else []

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, learning_rate=2e-4, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not gpu, bf16=gpu, seed=0, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watch()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    run.seconds = run.seconds[2:]
    return run


def liger(data: list[dict[str, torch.Tensor]], steps: int, folder: Path) -> Run:
    """Train with Liger-Kernel, in another process: it changes the classes of transformers."""
    return train(stock(True), data, steps, folder, use_liger_kernel=True)


def now() -> float:
    """Seconds, after the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# %% LoRA
# Adapters wrap linear layers, which patches leave in place, so patch before or after peft. peft saves and merges
# adapters as usual.
def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model with adapters on its attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    return get_peft_model(model, config)


def merged_is_the_same(model: torch.nn.Module, data: list[dict[str, torch.Tensor]], folder: Path) -> float:
    """Save the adapters, load them into a fresh stock model and merge: the largest difference of logits."""
    from peft import PeftModel

    model.save_pretrained(folder)
    fresh = PeftModel.from_pretrained(stock(torch.cuda.is_available()), folder).merge_and_unload()
    x = data[0]["input_ids"][None]
    with torch.no_grad():
        expected = model.cpu().eval()(input_ids=x).logits
        return float((fresh.eval()(input_ids=x).logits - expected).abs().max())


# %% The comparison
def main(argv: list[str] | None = None) -> None:
    """Train each variant in turns and print losses and times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 steps a run instead of 30")
    parser.add_argument("--out", type=Path, help="folder for the files of Trainer and peft; default: a temporary one")
    options = parser.parse_args(argv)
    for name in ("transformers", "accelerate", "peft"):
        if importlib.util.find_spec(name) is None:
            parser.error(f"{name} is missing: pip install transformers accelerate peft")
    with tempfile.TemporaryDirectory() as temporary:
        compare(options.out or Path(temporary), 8 if options.quick else 30)


def compare(folder: Path, steps: int) -> None:
    """Stock, patched and, on a GPU, Liger-Kernel; then adapters on a stock and on a patched model."""
    gpu = torch.cuda.is_available()
    data = examples(8 * steps, 1024 if gpu else 128)
    model = stock(gpu)
    variants: dict[str, torch.nn.Module] = {
        "stock": model,
        "patched": patched(copy.deepcopy(model)),
        "stock, LoRA": with_lora(copy.deepcopy(model)),
        "patched, LoRA": with_lora(patched(copy.deepcopy(model))),
    }
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    with_liger = gpu and importlib.util.find_spec("liger_kernel") is not None
    trained = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        for _ in range(ROUNDS):
            for name, start in variants.items():
                trained[name] = copy.deepcopy(start)  # a copy of a patched model is patched
                runs[name].append(train(trained[name], data, steps, folder))
            if with_liger:
                runs.setdefault("Liger", []).append(other.submit(liger, data, steps, folder).result())
    for name, found in runs.items():
        base = runs["stock, LoRA" if "LoRA" in name else "stock"]
        ratios = [statistics.median(b.seconds) / statistics.median(r.seconds) for b, r in zip(base, found, strict=True)]
        first, last = found[0].losses[0], found[0].losses[-1]
        step = statistics.median(second for run in found for second in run.seconds)
        print(f"{name:14} loss {first:.4f} to {last:.4f}, {step * 1e3:.1f} ms a step, "
              f"{statistics.median(ratios):.2f}x of stock ({min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    off = merged_is_the_same(trained["patched, LoRA"], data, folder / "adapters")
    print(f"adapters of the patched model, saved, loaded into a stock one and merged: logits differ by {off:.1e}")
    losses = {name: found[0].losses for name, found in runs.items()}
    pairs = ((losses["patched"], losses["stock"]), (losses["patched, LoRA"], losses["stock, LoRA"]))
    worst = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
    print(f"{'same' if worst < (2e-2 if gpu else 1e-3) else 'OTHER'} losses: they differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
