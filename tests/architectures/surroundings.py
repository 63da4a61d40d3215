"""Where a prepared model is used: each gives the loss, and the gradients by the stock model's names."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from variants import Model, Variant
from zoo import Architecture

Gradients = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, Gradients]
Surrounding = Callable[[Architecture, Variant], Result]


def trained(model: Model, inputs: dict[str, Any], call: Callable[..., Any] | None = None) -> Result:
    """One step.

    Args:
        model: whose gradients are returned.
        inputs: a batch.
        call: what is called in the model's place, such as what was compiled.
    """
    output = (model if call is None else call)(**inputs)
    loss = output[0] if isinstance(output, tuple) else output.loss
    loss.backward()
    return loss.detach().float(), gradients(model)


@torch.no_grad()
def gradients(model: Model) -> Gradients:
    """Those of all parameters, by the names that a checkpoint has for them; the model's weights are lost."""
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for parameter in model.parameters():
        parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    found = {name: value for name, value in model.state_dict().items() if name not in names}
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v.detach().clone()) for n, v in found.items()}


def prepared(architecture: Architecture, variant: Variant, **options: Any) -> Model:
    return variant.prepare(architecture.build(**options))


def plain(architecture: Architecture, variant: Variant) -> Result:
    return trained(prepared(architecture, variant), architecture.inputs())


def twice(architecture: Architecture, variant: Variant) -> Result:
    """A second step after one with other inputs: nothing is kept between calls."""
    model, inputs = prepared(architecture, variant), architecture.inputs()
    others = {n: v.flip(0) if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    model(**others)
    with torch.no_grad():
        model(**others)
    return trained(model, inputs)


def checkpointed(use_reentrant: bool) -> Surrounding:
    def surrounding(architecture: Architecture, variant: Variant) -> Result:
        model = prepared(architecture, variant)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads() if use_reentrant and "input_ids" in architecture.inputs() else None
        return trained(model, architecture.inputs())

    return surrounding


def autocast(architecture: Architecture, variant: Variant) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        return trained(prepared(architecture, variant), architecture.inputs())


def autocast_checkpointed(architecture: Architecture, variant: Variant) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        return checkpointed(False)(architecture, variant)


def bfloat16(architecture: Architecture, variant: Variant) -> Result:
    """Weights in 16 bits."""
    inputs = {n: v.bfloat16() if _is_float(v) else v for n, v in architecture.inputs().items()}
    loss, found = trained(prepared(architecture, variant).bfloat16(), inputs)
    return loss, {name: gradient.float() for name, gradient in found.items()}


def compiled(backend: str = "aot_eager", context: Callable[[], Any] = contextlib.nullcontext) -> Surrounding:
    def surrounding(architecture: Architecture, variant: Variant) -> Result:
        """As one graph, unless that is too much for stock too."""
        torch._dynamo.reset()
        model = prepared(architecture, variant)
        try:
            with context():
                return trained(model, architecture.inputs(), torch.compile(model, fullgraph=True, backend=backend))
        except torch._dynamo.exc.TorchDynamoException:
            if variant.patched or variant.fused:
                _check_not_one_graph(architecture, context)
        torch._dynamo.reset()
        model = prepared(architecture, variant)
        with context():
            return trained(model, architecture.inputs(), torch.compile(model, backend=backend))

    return surrounding


def _check_not_one_graph(architecture: Architecture, context: Callable[[], Any]) -> None:
    """Let the error that is at hand pass on if stock has none."""
    torch._dynamo.reset()
    try:
        with context():
            torch.compile(architecture.build(), fullgraph=True, backend="eager")(**architecture.inputs())
    except torch._dynamo.exc.TorchDynamoException:
        return
    raise AssertionError("stock is one graph, and this is not")


def evaluated(architecture: Architecture, variant: Variant) -> Result:
    """Without labels: what comes out, under no_grad and in inference mode, and hidden states."""
    model, inputs = prepared(architecture, variant).eval(), architecture.inputs()
    inputs.pop("return_loss", None)
    if "decoder_input_ids" in _forward_names(model) and "labels" in inputs:
        inputs["decoder_input_ids"] = inputs["labels"]
    inputs.pop("labels", None)
    found = {}
    for name, mode in (("no_grad", torch.no_grad), ("inference", torch.inference_mode)):
        with mode():
            output = model(**inputs, output_hidden_states=True)
        found |= {f"{name} {i}": t.clone() for i, t in enumerate(_tensors(output))}
    return torch.zeros(()), found


def generated(architecture: Architecture, variant: Variant) -> Result:
    """Words after a prompt, with a cache."""
    model = prepared(architecture, variant).eval()
    kept = ("input_ids", "attention_mask", "input_features", "encoder_hidden_states")
    inputs = {name: value for name, value in architecture.inputs().items() if name in kept}
    if not hasattr(model, "generate") or not model.can_generate():
        raise NotImplementedError("it writes nothing")
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "output_scores": True}
    found = model.generate(**inputs, **options, return_dict_in_generate=True)
    return torch.zeros(()), {"words": found.sequences.float(), "scores": torch.stack(found.scores).clamp(min=-1e4)}


def threads(architecture: Architecture, variant: Variant) -> Result:
    """Four requests at once to one model; the first one's results."""
    model, inputs = prepared(architecture, variant).eval(), architecture.inputs()
    requests = [inputs] + [{n: v.roll(i, 0) if _is_float(v) or n == "input_ids" else v for n, v in inputs.items()}
                           for i in (1, 2, 3)]  # fmt: skip
    errors: list[BaseException] = []
    found: dict[str, torch.Tensor] = {}

    def serve(index: int) -> None:
        try:
            with torch.no_grad():
                for step in range(3):
                    output = model(**requests[index])
                    if index == 0:
                        found[f"loss {step}"] = output.loss.reshape(1)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return torch.zeros(()), found


def carried(carry: Callable[[Model], Model]) -> Surrounding:
    """A model that was copied, saved or sent after it was prepared."""
    return lambda architecture, variant: trained(carry(prepared(architecture, variant)), architecture.inputs())


def saved(model: Model) -> Model:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def published(model: Model) -> Model:
    """As users of the Hub do; the class's own model comes back."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        back, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return back.train()


def assigned(before: bool) -> Surrounding:
    """Made without memory, then given the tensors of a checkpoint; prepared before or after that."""

    def surrounding(architecture: Architecture, variant: Variant) -> Result:
        full = architecture.build()
        model = copy.deepcopy(full).to("meta")
        model = variant.prepare(model) if before else model
        model.load_state_dict(full.state_dict(), assign=True)
        for name, buffer in full.named_buffers(remove_duplicate=False):  # those that no checkpoint has
            place, _, last = name.rpartition(".")
            model.get_submodule(place)._buffers[last] = buffer
        model.tie_weights()
        for module, own in zip(model.modules(), full.modules(), strict=False):
            for name, value in vars(own).items() if not before else ():  # what transformers keeps beside buffers
                if isinstance(value, torch.Tensor):
                    setattr(module, name, value)
        return trained(model if before else variant.prepare(model), architecture.inputs())

    return surrounding


def on_meta(architecture: Architecture, variant: Variant) -> Result:
    """Shapes alone. Of a mask transformers reads whether it is all ones, and without a cache positions too."""
    model, inputs = prepared(architecture, variant).to("meta"), architecture.inputs()
    model.config.use_cache = True
    inputs = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    inputs.pop("attention_mask", None)
    loss = model(**inputs).loss
    loss.backward()
    return torch.zeros(()), {}


def default_device(architecture: Architecture, variant: Variant) -> Result:
    """Prepared where new tensors are on another device."""
    model = architecture.build()
    with torch.device("meta"):
        variant.prepare(model)
    return trained(model, architecture.inputs())


def tuple_by_call(architecture: Architecture, variant: Variant) -> Result:
    return trained(prepared(architecture, variant), {**architecture.inputs(), "return_dict": False})


def tuple_by_configuration(architecture: Architecture, variant: Variant) -> Result:
    model = prepared(architecture, variant)
    model.config.return_dict = False
    return trained(model, architecture.inputs())


def accumulated(architecture: Architecture, variant: Variant) -> Result:
    """The number of words over several batches, as Trainer gives it."""
    model = prepared(architecture, variant)
    if not getattr(model, "accepts_loss_kwargs", True) or not _takes_keywords(model):
        raise NotImplementedError("it takes no number of words")
    return trained(model, {**architecture.inputs(), "num_items_in_batch": torch.tensor(37)})


def adapted(before: bool) -> Surrounding:
    """Layers in whose places LoRA puts its own, before or after the model is prepared; `fuse` knows none."""

    def surrounding(architecture: Architecture, variant: Variant) -> Result:
        model = architecture.build()
        if not before:
            variant.prepare(model)
        torch.manual_seed(2)
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
                    setattr(module, name, Adapter(layer))
        return trained(variant.prepare(model) if before else model, architecture.inputs())

    return surrounding


class Adapter(torch.nn.Module):
    """As LoRA."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _forward_names(model: Model) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(type(model).forward).parameters)


def _takes_keywords(model: Model) -> bool:
    return "kwargs" in _forward_names(model)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(output.to_tuple()) if isinstance(each, torch.Tensor)]


def _bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


ROUNDED = {
    "autocast": autocast,
    "autocast, checkpointed": autocast_checkpointed,
    "bfloat16": bfloat16,
}
COMPILED = {"compiled": compiled(), "compiled, inductor": compiled("inductor")}
COMPILED_ROUNDED = {"compiled, autocast": compiled(context=_bfloat16)}
EXACT = {
    "training": plain,
    "second step": twice,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "evaluation": evaluated,
    "generate": generated,
    "threads": threads,
    "deepcopy": carried(copy.deepcopy),
    "pickle": carried(lambda model: pickle.loads(pickle.dumps(model))),
    "torch.save": carried(saved),
    "save_pretrained": carried(published),
    "meta, then assign": assigned(before=True),
    "assign, then prepared": assigned(before=False),
    "meta": on_meta,
    "default device": default_device,
    "return_dict in call": tuple_by_call,
    "return_dict in configuration": tuple_by_configuration,
    "num_items_in_batch": accumulated,
    "adapters, then prepared": adapted(before=True),
}
ADAPTED = {"adapters": adapted(before=False)}
