"""`Decoder.generate`: ends, lengths, streams, errors, and what does not grow."""

import gc
import threading

import pytest
import torch
from tiny_models import Recorder, make, prompt, stock

from kernel_pytorch.fused_decode import Decoder
from kernel_pytorch.fused_decode.decoder import runner


def ends_of(model, ids, mask, steps):
    """A token that each row gives for the first time at its step."""
    tokens = stock(model, ids, mask, 30)[:, ids.shape[1] :].tolist()
    return [row[step] for row, step in zip(tokens, steps, strict=True)]


@pytest.mark.parametrize("pad", [None, 7])
@pytest.mark.parametrize("steps", [[0, 4, 9], [29, 1, 0], [0, 0, 0]])
def test_rows_end_on_their_own(steps, pad):
    model = make("llama")
    ids, mask = prompt([4, 9, 2])
    ends = ends_of(model, ids, mask, steps)
    options = {"eos_token_id": ends, **({} if pad is None else {"pad_token_id": pad})}
    expected, streamed, ours = stock(model, ids, mask, **options), Recorder(), Recorder()
    stock(model, ids, mask, streamer=streamed, **options)
    given = Decoder(model, 3, 64).generate(ids, mask, 30, streamer=ours, **options)
    assert given.equal(expected)
    assert ours.got == streamed.got
    one = ends[0]
    given = Decoder(model, 3, 64).generate(ids, mask, 30, eos_token_id=one)
    assert given.equal(stock(model, ids, mask, eos_token_id=one))


def test_end_tokens_of_the_generation_config():
    model = make("llama")
    ids, mask = prompt([4, 9])
    model.generation_config.eos_token_id = ends_of(model, ids, mask, [5, 2])
    model.generation_config.pad_token_id = None
    decoder = Decoder(model, 2, 64)
    assert decoder.generate(ids, mask, 30).equal(stock(model, ids, mask))
    assert decoder.generate(ids, mask, 30, eos_token_id=()).shape == (2, 39)


def test_a_prompt_that_ends_with_an_end_token_goes_on():
    model = make("llama")
    ids, _ = prompt([4])
    ids[0, -1] = end = 17
    expected = stock(model, ids, eos_token_id=end)
    assert expected.shape[1] > 5
    assert Decoder(model, 1, 64).generate(ids, max_new_tokens=30, eos_token_id=end).equal(expected)


@pytest.mark.parametrize("ends", [None, 95])
def test_without_a_mask_padding_is_what_transformers_takes_for_it(ends):
    model = make("llama")
    ids, mask = prompt([4, 9])
    for pad in (0, 95):
        options = {"eos_token_id": ends, "pad_token_id": pad}
        given = Decoder(model, 2, 64).generate(torch.where(mask == 0, pad, ids), max_new_tokens=20, **options)
        assert given.equal(stock(model, torch.where(mask == 0, pad, ids), None, 20, **options))


def test_a_prompt_of_int32_gives_int64():
    model = make("llama")
    ids, mask = prompt([4, 9])
    given = Decoder(model, 2, 64).generate(ids.int(), mask, 5)
    assert given.dtype == torch.int64
    assert given.equal(Decoder(model, 2, 64).generate(ids, mask, 5))


def test_filled_to_the_last_slot():
    model = make("mistral_full")
    ids, mask = prompt([11, 4])
    decoder = Decoder(model, 3, 24)
    assert decoder.generate(ids, mask, 13).equal(stock(model, ids, mask, 13))
    assert not any(k[2].any() for k, *_ in decoder._step.caches.layers), "a row that is not in use was written"
    message = "a prompt of 11 and 14 new tokens are 25; the Decoder was made for max_length=24"
    with pytest.raises(ValueError, match=message):
        decoder.generate(ids, mask, 14)
    step, last = decoder._step, 23
    step.tokens.fill_(5)
    step.caches.lengths.copy_(torch.tensor([last, 3, -1]))
    before = [k.clone() for k, *_ in step.caches.layers]
    with torch.no_grad():
        step("greedy")
    for old, (k, *_) in zip(before, step.caches.layers, strict=True):
        written = [(k[row] != old[row]).any(0).any(-1).nonzero().flatten().tolist() for row in range(3)]
        assert written == [[last], [3], []]


def test_rows_that_ended_are_not_written():
    model = make("llama")
    ids, mask = prompt([9, 4])
    end = ends_of(model, ids, mask, [2, 2])[0]
    decoder = Decoder(model, 2, 64)
    decoder.generate(ids, mask, 30, eos_token_id=end)
    assert [k[0].any(0).any(-1).sum().item() for k, *_ in decoder._step.caches.layers] == [9 + 2, 9 + 2]


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"input_ids": torch.ones(1, 3)}, TypeError, "input_ids: given torch.float32; it must be a tensor of torch.int64"),
    ({"input_ids": [[1, 2]]}, TypeError, "input_ids: given list"),
    ({"input_ids": torch.ones(3, dtype=torch.int64)}, ValueError, r"shape is \(3,\); it must be \(rows, columns\)"),
    ({"input_ids": torch.ones(1, 0, dtype=torch.int64)}, ValueError, "not empty"),
    ({"input_ids": torch.ones(3, 2, dtype=torch.int64)}, ValueError, "3 rows; at most 2 are allowed, the batch_size"),
    ({"input_ids": torch.full((1, 2), 96)}, ValueError, "tokens from 96 to 96; the model has those from 0 to 95"),
    ({"input_ids": torch.full((1, 2), -1)}, ValueError, "tokens from -1 to -1"),
    ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, ValueError, "row 0 is all padding"),
    ({"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}, ValueError, "row 1 has zeros behind its first token"),
    ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, ValueError, "row 0 has zeros behind.*padding_side"),
    ({"attention_mask": torch.ones(2, 4)}, ValueError, r"given \(2, 4\); it must have the shape of input_ids"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens: given 0; it must be an integer, at least 1"),
    ({"max_new_tokens": 30}, ValueError, "a prompt of 3 and 30 new tokens are 33; .* max_length=32"),
    ({"pad_token_id": "a"}, TypeError, "pad_token_id: given 'a'; it must be an integer"),
    ({"input_ids": torch.tensor([[5, 0, 6]]), "attention_mask": None}, ValueError, "inferred from pad_token_id: give"),
    ({"eos_token_id": range(65)}, ValueError, "eos_token_id: given 65; at most 64"),
    ({"eos_token_id": [3, 2**70]}, ValueError, "eos_token_id: given .*; each must fit in 64 bits"),
    ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature: given 0.0; it must be from 1e-30"),
    ({"do_sample": True, "temperature": "1"}, TypeError, "temperature: given str"),
    ({"do_sample": True, "top_p": 1.5}, ValueError, "top_p: given 1.5; it must be from 0 to 1"),
    ({"do_sample": True, "top_k": -1}, ValueError, "top_k: given -1"),
])  # fmt: skip
def test_errors_come_before_anything_runs(arguments, error, message, monkeypatch):
    model, streamer = make("llama"), Recorder()
    decoder = Decoder(model, 2, 32)
    monkeypatch.setattr(model, "forward", lambda **_: pytest.fail("the model ran"))
    monkeypatch.setattr(decoder, "check", _without_forward(model, decoder.check))
    with pytest.raises(error, match=message):
        decoder.generate(**{"input_ids": torch.ones(2, 3, dtype=torch.int64), "streamer": streamer, **arguments})
    assert streamer.got == []


def _without_forward(model, check):
    def checked(*args):
        forward = model.__dict__.pop("forward")
        try:
            return check(*args)
        finally:
            model.forward = forward

    return checked


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sample", [False, True])
def test_logits_that_are_no_numbers_are_an_error(value, sample):
    model = make("llama")
    decoder = Decoder(model, 2, 32)
    with torch.no_grad():
        model.lm_head.weight[11] = value
    ids, mask = prompt([4, 5])
    with pytest.raises(RuntimeError, match="the logits of row 0 are NaN or infinite in step 0"):
        decoder.generate(ids, mask, 5, do_sample=sample)
    assert decoder._step.caches.lengths.tolist() == [-1, -1]


def test_equal_logits_give_the_lowest_token():
    model = make("llama")
    ids, _ = prompt([4])
    winner = int(stock(model, ids, new=1)[0, -1])
    with torch.no_grad():
        for twin in (winner + 1, winner - 1):
            model.lm_head.weight[twin % 96] = model.lm_head.weight[winner]
    given = Decoder(model, 1, 64).generate(ids, max_new_tokens=10)
    assert given[0, 4] == min(winner, (winner + 1) % 96, (winner - 1) % 96)
    assert given.equal(stock(model, ids, new=10))


def test_decoders_in_threads():
    models = [make("llama"), make("gemma2")]
    ids, mask = prompt([4, 9])
    expected = [stock(model, ids, mask, 60) for model in models for _ in range(2)]
    decoders = [Decoder(models[0], 2, 80), Decoder(models[0], 2, 80), Decoder(models[1], 2, 80)]
    decoders.append(decoders[-1])  # one in two threads takes turns
    given = [None] * 4

    def run(index):
        given[index] = decoders[index].generate(ids, mask, 60)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one.equal(other) for one, other in zip(given, expected, strict=True))


@pytest.mark.slow
def test_nothing_grows_with_the_steps():
    counts = []

    class Counter(Recorder):
        def put(self, value):
            self.got.append(None)
            if len(self.got) % 100 == 2:
                gc.collect()
                counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))

    Decoder(make("gemma2"), 1, 320).generate(prompt([5])[0], max_new_tokens=301, streamer=Counter())
    assert len(counts) == 4
    assert max(counts[1:]) <= counts[0]  # garbage of other tests may go meanwhile


def test_errors_in_a_streamer_leave_the_decoder_usable():
    model = make("llama")
    ids, _ = prompt([4])
    decoder = Decoder(model, 1, 64)

    class Breaks(Recorder):
        def put(self, value):
            if len(value.shape) == 1:
                raise KeyError("stop")

    with pytest.raises(KeyError):
        decoder.generate(ids, streamer=Breaks())
    assert decoder.generate(ids, max_new_tokens=30).equal(stock(model, ids))


def test_steps_of_ones_own_are_those_of_generate():
    model = make("llama")
    decoder, (ids, mask) = Decoder(model, 2, 64), prompt([4, 7])
    expected = stock(model, ids, mask, new=6)[:, -6:]
    decoder.start(ids, mask)
    found = [decoder.tokens.clone()]
    for _ in range(5):
        decoder.step()
        found.append(decoder.tokens.clone())
        assert decoder.logits.argmax(-1).equal(decoder.tokens)
    assert torch.stack(found, 1).equal(expected)
    for _ in range(64 - 7 - 5):
        decoder.step()
    with pytest.raises(RuntimeError, match="all 64 slots are full"):
        decoder.step()
    decoder.start(ids, mask)
    decoder.generate(ids, mask, max_new_tokens=2)  # ends what was started
    with pytest.raises(RuntimeError, match="call start first"):
        decoder.step()
    with pytest.raises(ValueError, match=r"input_ids: 64 columns leave no room .* max_length=64"):
        decoder.start(torch.ones(1, 64, dtype=torch.int64))
    decoder.revert()
    with pytest.raises(RuntimeError, match="was reverted"):
        decoder.step()


def test_a_prompt_with_padding_starts_as_it_generates():
    model = make("llama")
    decoder, ids = Decoder(model, 1, 64), torch.tensor([[0, 0, 4, 5]])
    expected = stock(model, ids, (ids != 0).long(), new=3)
    decoder.start(ids)
    assert decoder.logits.argmax(-1).equal(decoder.tokens)
    found = [decoder.tokens.clone()]
    decoder.step()
    assert torch.stack([*found, decoder.tokens], 1).equal(expected[:, 4:6])
    for wrong in ([[1, 2]], None):
        with pytest.raises(TypeError, match="input_ids: given"):
            decoder.start(wrong)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"eos_token_id": [1.5]}, TypeError, "eos_token_id: given .* it must be an integer"),
        ({"eos_token_id": "a"}, TypeError, "eos_token_id: given 'a'"),
        ({"do_sample": True, "seed": 1.5}, TypeError, "seed: given float"),
        ({"streamer": 3}, TypeError, "streamer: given int; it must have the methods put and end"),
        ({"do_sample": True, "seed": 2**70}, ValueError, "seed: given .* must fit in 64 bits"),
        ({"do_sample": True, "temperature": 1e-50}, ValueError, "temperature: given 1e-50; it must be from 1e-30"),
    ],
)
def test_arguments_that_are_none(arguments, error, message):
    with pytest.raises(error, match=message):
        Decoder(make("llama"), 1, 64).generate(torch.tensor([[3, 4]]), **arguments)


def test_ends_in_a_tensor_and_all_of_a_large_k():
    model = make("llama")
    decoder, (ids, mask) = Decoder(model, 1, 64), prompt([4])
    end = int(stock(model, ids, mask, new=12)[0, 9])
    expected = stock(model, ids, mask, new=12, eos_token_id=end)
    assert decoder.generate(ids, mask, max_new_tokens=12, eos_token_id=torch.tensor([end])).equal(expected)
    draws = (decoder.generate(ids, mask, do_sample=True, top_k=k, seed=1) for k in (0, 10**30))
    assert next(draws).equal(next(draws))


def test_a_level_that_cannot_run_says_so(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="level: given 'triton' for a model on cpu; move it to a GPU"):
        Decoder(make("llama"), 1, 64, level="triton")


def test_a_gpu_is_read_two_steps_behind(monkeypatch):
    """The loop of a GPU, with a graph, events and memory that record what is asked of them."""
    model, log = make("llama"), []
    decoder = Decoder(model, 1, 64)
    step = decoder._step

    class Graph:
        def replay(self):
            log.append("replay")
            step("greedy")

        def reset(self):
            log.append("reset")

    class Event:
        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

    class Device:
        type = "cuda"

    monkeypatch.setattr(runner.torch.cuda, "device", lambda _: torch.no_grad())
    decoder._runner.device, decoder._runner._graphs = Device(), {"greedy": (Graph(), step.last_logits)}
    decoder._runner._events = [Event() for _ in range(4)]
    ids, _ = prompt([4])
    expected = stock(model, ids, new=12)
    assert decoder.generate(ids, max_new_tokens=12).equal(expected)
    assert log[:9] == ["record", "replay", "record", "replay", "record", "wait", "replay", "record", "wait"]
    assert log.count("replay") == 11
    assert log.count("wait") == 12
    log.clear()
    end = int(expected[0, 7])
    first = expected[0, 4:].tolist().index(end)
    assert decoder.generate(ids, max_new_tokens=12, eos_token_id=end).equal(expected[:, : 5 + first])
    assert log.count("replay") == first + 2
    decoder.revert()
    assert log[-1] == "reset"


def test_a_failed_capture_is_reset(monkeypatch):
    decoder, log = Decoder(make("llama"), 1, 64), []

    class Graph:
        def reset(self):
            log.append("reset")

    class Device:
        type = "cuda"

    cuda = runner.torch.cuda
    monkeypatch.setattr(cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(runner, "_new_stream", lambda _: "a stream")

    class Fails:
        def __init__(self, *_, capture_error_mode, **__):
            log.append(capture_error_mode)

        def __enter__(self):
            raise torch.OutOfMemoryError("no memory")

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(cuda, "graph", Fails)
    decoder._runner.device = Device()
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        decoder._runner.prepare("greedy")
    assert log == ["thread_local", "reset"]
    assert decoder._runner._graphs == {}
    assert not any(k.any() for k, *_ in decoder._step.caches.layers), "warming up wrote into a cache"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_that_a_waiting_step_writes_to_is_not_reused():
    """The kernel that chooses writes into pinned memory, which a dropped Decoder gives back when its steps are done."""
    decoder = Decoder(make("llama").cuda(), 1, 64)
    decoder.start(prompt([5])[0].cuda())
    shape = decoder._step.caches.history.shape
    torch.cuda._sleep(2 * 10**9)
    decoder.step()
    del decoder
    gc.collect()
    taken = [torch.full(shape, 7, dtype=torch.int64, pin_memory=True) for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((each == 7).all()) for each in taken)
