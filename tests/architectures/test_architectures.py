"""Every architecture, patched and fused, everywhere: the losses and gradients of stock, or refused by name."""

import functools
import io
import itertools
import json
import math

import pytest
import torch

pytest.importorskip("transformers")

from replaced import FILE, count
from surroundings import ADAPTED, COMPILED, COMPILED_ROUNDED, EXACT, ROUNDED
from variants import STOCK, VARIANTS, RefusedError, undo
from zoo import ARCHITECTURES, QUICK

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, of checkpoints, of gloo

FLOAT32 = 2e-5
"""Part of the largest element of a gradient: 170 units in the last place, for sums of some hundred products."""
INDUCTOR = ("Llama", "Gemma2", "Bert", "Bart")
CROSSING = ("Bart", "MBart", "Marian", "Pegasus", "Blenderbot", "M2M100", "PLBart", "Speech2Text")
MAY_FALL = {**{(name, "fuse"): 4 for name in CROSSING}, ("Segformer", "fuse"): 1, ("BertDecoder", "fuse"): 2}
"""Of cross-attention, keys and values are of another tensor than queries: that is no longer one product."""


def cases(surroundings, variants=tuple(VARIANTS), quick=(), names=ARCHITECTURES):
    """A parameter for each architecture, surrounding and variant; those that are not quick are of the session alone."""
    return [
        pytest.param(
            name, surrounding, variant, id=f"{name}-{surrounding}-{variant}",
            marks=() if is_quick(name, variant, quick) else pytest.mark.architectures,
        )
        for name, surrounding, variant in itertools.product(names, surroundings, variants)
    ]  # fmt: skip


def is_quick(name, variant, quick):
    """Whether `-m slow` has it: of eight architectures one variant, or those that are given."""
    return quick is not None and name in QUICK and variant in (quick or (QUICK[name],))


@functools.cache
def of_stock(name, surrounding):
    """What is expected; skips where transformers itself cannot do that."""
    try:
        return {**EXACT, **ADAPTED, **ROUNDED}[surrounding](ARCHITECTURES[name], STOCK)
    except Exception as error:
        return str(error).splitlines()[0] if str(error) else repr(error)


def expected(name, surrounding):
    found = of_stock(name, surrounding)
    if isinstance(found, str):
        pytest.skip(f"stock: {found}")
    return found


def ours(name, run, variant, record):
    """What a variant gives. A model that is left as it is needs no test: its reason is recorded."""
    kind = VARIANTS[variant]
    try:
        with kind.levels():
            return run(ARCHITECTURES[name], kind)
    except RefusedError as error:
        record("refused", str(error))
        pytest.skip(f"refused by name: {error}")


def check(found, wanted, tolerance):
    """No element is off by more than a part of the largest of its tensor, and of the noise of the largest of all."""
    (loss, gradients), (stock_loss, stock_gradients) = found, wanted
    torch.testing.assert_close(loss, stock_loss, rtol=tolerance, atol=0.0)
    assert gradients.keys() == stock_gradients.keys()
    largest = max((float(g.abs().max()) for g in stock_gradients.values() if g.numel()), default=0.0)
    for name, gradient in gradients.items():
        wanted_gradient = stock_gradients[name]
        assert gradient.shape == wanted_gradient.shape, name
        scale = max(float(wanted_gradient.abs().max()), 1e-2 * largest)
        off = float((gradient - wanted_gradient).abs().max()) / (scale or 1.0)
        assert off <= tolerance, f"{name}: off by {off:.1e} of its largest element"


def check_rounded(found, wanted, exact):
    """As far from float32 as stock in 16 bits is, all gradients together; the error of a single one is luck."""
    (loss, gradients), (stock_loss, stock_gradients), (_, exact_gradients) = found, wanted, exact
    torch.testing.assert_close(loss, stock_loss, rtol=2**-6, atol=0.0)
    assert gradients.keys() == stock_gradients.keys()
    ours, theirs = (
        {n: float((g[n] - e).norm()) for n, e in exact_gradients.items()} for g in (gradients, stock_gradients)
    )
    size = {name: float(gradient.norm()) for name, gradient in exact_gradients.items()}
    whole = math.hypot(*size.values())
    assert math.hypot(*ours.values()) <= 3.0 * math.hypot(*theirs.values()) + 2**-6 * whole
    for name in gradients:  # a wrong factor, or a gradient that is missing
        allowed = 3.0 * theirs[name] + 0.25 * max(size[name], 1e-2 * whole)
        assert ours[name] <= allowed, f"{name}: off by {ours[name]:.1e}, stock by {theirs[name]:.1e}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.architectures)
                                  for n in ARCHITECTURES])  # fmt: skip
def test_as_many_modules_are_replaced_as_before(name):
    before, now = json.loads(FILE.read_text())[name], count(ARCHITECTURES[name])
    wanted = {package: MAY_FALL.get((name, package), number) for package, number in before.items()}
    fewer = {package: now.get(package, 0) for package, number in wanted.items() if now.get(package, 0) < number}
    assert not fewer, f"fewer modules are replaced than {wanted}"


@pytest.mark.parametrize(("name", "surrounding", "variant"), [
    *cases(EXACT), *cases(ADAPTED, ("patched", "patched at default levels"), quick=("patched",))
])  # fmt: skip
def test_the_same_in(name, surrounding, variant, record_property):
    wanted = expected(name, surrounding)
    check(ours(name, {**EXACT, **ADAPTED}[surrounding], variant, record_property), wanted, FLOAT32)


@pytest.mark.parametrize(("name", "surrounding", "variant"), cases(ROUNDED))
def test_the_same_rounded_in(name, surrounding, variant, record_property):
    wanted, exact = expected(name, surrounding), expected(name, "training")
    check_rounded(ours(name, ROUNDED[surrounding], variant, record_property), wanted, exact)


COMPILING = ("patched", "both", "patched at default levels")


@pytest.mark.parametrize(("name", "surrounding", "variant"), [
    *cases(["compiled"], COMPILING, quick=None),
    *cases(["compiled, inductor"], COMPILING, quick=None, names=INDUCTOR),
])  # fmt: skip
def test_the_same_compiled(name, surrounding, variant, record_property):
    check(ours(name, COMPILED[surrounding], variant, record_property), expected(name, "training"), FLOAT32)


@pytest.mark.parametrize(("name", "surrounding", "variant"), cases(COMPILED_ROUNDED, COMPILING))
def test_the_same_compiled_and_rounded(name, surrounding, variant, record_property):
    found = ours(name, COMPILED_ROUNDED[surrounding], variant, record_property)
    check_rounded(found, expected(name, "autocast"), expected(name, "training"))


RANKS = ("DDP", "FSDP2", "spawned worker")


@pytest.mark.parametrize(("name", "surrounding", "variant"), cases(RANKS, COMPILING))
def test_the_same_on_two_ranks(name, surrounding, variant, ranks, record_property):
    def run(architecture, kind):
        return run_on_ranks(ranks, architecture, kind, surrounding)

    wanted = of_stock_on_two_ranks(ranks, name, surrounding)
    check(ours(name, run, variant, record_property), wanted, FLOAT32)


@functools.cache
def of_stock_on_two_ranks(ranks, name, surrounding):
    """The same of stock; skips where that fails."""
    try:
        return run_on_ranks(ranks, ARCHITECTURES[name], STOCK, surrounding)
    except RuntimeError as error:
        pytest.skip(f"stock: {str(error).strip().splitlines()[-1]}")


def run_on_ranks(ranks, architecture, variant, surrounding):
    """What rank 0 gives; where a model is refused, that is so here."""
    model = variant.prepare(architecture.build())
    if surrounding != "spawned worker":
        return ranks.run("parallel", architecture.name, variant, surrounding)
    file = io.BytesIO()
    torch.save(model, file)
    return ranks.run("sent", file.getvalue(), architecture.inputs(), variant)


@pytest.mark.parametrize(("name", "surrounding", "variant"), cases(["undone"], COMPILING))
def test_what_is_undone_is_stock_bit_for_bit(name, surrounding, variant, record_property):
    def run(architecture, kind):
        return undo(kind.prepare(architecture.build())), architecture.inputs()

    model, inputs = ours(name, run, variant, record_property)
    stock = ARCHITECTURES[name].build()
    assert [type(m).__qualname__ for m in model.modules()] == [type(m).__qualname__ for m in stock.modules()]
    assert list(model.state_dict()) == list(stock.state_dict())
    assert not any("forward" in vars(module) for module in model.modules())
    loss, _ = expected(name, "training")
    assert torch.equal(model(**inputs).loss.detach().float(), loss)
