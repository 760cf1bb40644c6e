"""Drawing: the memory of keys and values, chance, and independence of the number of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from zero_nb.config import UsageError
from zero_nb.train import sampling
from zero_nb.train.data import Digits
from zero_nb.train.model import DIGITS, GPT, GPTConfig
from zero_nb.train.sampling import CHUNK, draw_digits, draw_text, draw_tokens

SMALL = GPTConfig(vocab_size=11, seq_len=9, width=12, heads=3, blocks=2)


@pytest.fixture(autouse=True)
def _one_blas_thread():
    with threadpool_limits(1):
        yield


def parameters(model, ranks, scale=12, seed=0):
    """Equal rows, with weights large enough that the logits tell tokens apart."""
    out = {}
    for name, value in model.init(seed).items():
        value = value * (scale if value.ndim == 2 else 1)
        out[name] = np.repeat(value[None], ranks, axis=0)
        out[name].flags.writeable = False
    return out


# ---------------------------------------------------------------------- one token after the other


@pytest.mark.parametrize("config", [SMALL, DIGITS])
def test_one_token_at_a_time_gives_the_logits_of_the_whole(config):
    model = GPT(config)
    ranks, samples = 2, 3
    params = parameters(model, ranks)
    x = np.random.default_rng(0).integers(0, config.vocab_size, (ranks, samples, config.seq_len))
    whole, _ = model.forward(params, x)
    memory = sampling._empty_memory(model, params, ranks, samples, config.seq_len)
    for keys, values in memory.values():
        keys[...] = values[...] = np.nan  # what is read too early shows
    for position in range(config.seq_len):
        token = np.ascontiguousarray(x[:, :, position : position + 1])
        logits = sampling.step(model, params, token, memory, position)
        assert logits.dtype == np.float32
        # Products of 3 rows instead of 3 T rows: float32 sums in another order.
        np.testing.assert_allclose(
            logits[:, :, 0], whole[:, :, position], rtol=0, atol=1e-5 * np.abs(whole).max()
        )
    assert np.abs(whole).max() > 1


def naive_draw(model, params, start, length, allowed, seed, temperature):
    """Draw one sample at a time with a full forward pass a token."""
    params = {name: value[:1] for name, value in params.items()}
    drawn = []
    for i, first in enumerate(start):
        chance = np.random.default_rng([seed, i]).random(length)
        tokens = list(first)
        for u in chance:
            logits, _ = model.forward(params, np.array([[tokens]]))
            logits = logits[0, 0, -1].astype(np.float64)
            share = [np.exp(logits[token] / temperature) for token in allowed]
            left = u * sum(share)
            picked = 0
            while left >= share[picked]:
                left -= share[picked]
                picked += 1
            tokens.append(allowed[picked])
        drawn.append(tokens[len(first) :])
    return np.array(drawn)


@pytest.mark.parametrize("given", [1, 3])
def test_drawing_is_what_the_slow_way_draws(given):
    model = GPT(SMALL)
    params = parameters(model, 2)
    start = np.random.default_rng(1).integers(0, 11, (CHUNK + 3, given))
    settings = {"allowed": range(2, 9), "seed": 4, "temperature": 0.7}
    length = SMALL.seq_len - given + 1
    fast = draw_tokens(model, params, start, length, **settings)
    np.testing.assert_array_equal(fast, naive_draw(model, params, start, length, **settings))
    assert len(np.unique(fast)) == 7


# ------------------------------------------------------------------ the same on any number of ranks


@pytest.mark.parametrize("count", [1, CHUNK, 2 * CHUNK + 5])
def test_drawings_do_not_depend_on_the_number_of_ranks(count):
    model = GPT(SMALL)
    start = np.random.default_rng(1).integers(0, 11, (count, 1))
    alone = draw_tokens(model, parameters(model, 1), start, 9, seed=3)
    assert alone.shape == (count, 9)
    for ranks in (2, 3, 4, 7):
        np.testing.assert_array_equal(
            alone, draw_tokens(model, parameters(model, ranks), start, 9, seed=3)
        )


def test_logits_do_not_depend_on_the_number_of_ranks_to_the_bit(monkeypatch):
    seen = {}
    for ranks in (1, 4):
        model, logits = GPT(DIGITS), []
        original = sampling.step
        with monkeypatch.context() as patch:
            patch.setattr(
                sampling,
                "step",
                lambda *a, original=original, logits=logits: (
                    logits.append(original(*a)) or logits[-1]
                ),
            )
            draw_tokens(model, parameters(model, ranks), np.zeros((4 * CHUNK, 1)), 20)
        rounds = 4 // ranks
        stacked = np.stack(logits).reshape(rounds, 20, ranks, CHUNK, -1)
        seen[ranks] = stacked.swapaxes(1, 2).reshape(4, 20, CHUNK, -1)
    np.testing.assert_array_equal(seen[1], seen[4])


def test_drawings_do_not_depend_on_how_many_there_are():
    model = GPT(SMALL)
    params = parameters(model, 2)
    start = np.random.default_rng(1).integers(0, 11, (2 * CHUNK + 9, 1))
    many = draw_tokens(model, params, start, 9)
    np.testing.assert_array_equal(many[:5], draw_tokens(model, params, start[:5], 9))


def test_the_seed_decides():
    model = GPT(SMALL)
    params = parameters(model, 1)
    start = np.zeros((CHUNK, 1), np.int64)
    first = draw_tokens(model, params, start, 9, seed=0)
    np.testing.assert_array_equal(first, draw_tokens(model, params, start, 9, seed=0))
    assert (first != draw_tokens(model, params, start, 9, seed=1)).any()
    assert len({bytes(row) for row in first}) > CHUNK // 2  # samples differ from each other


# ----------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_come_as_often_as_the_model_says(temperature):
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
    n = 10_000
    chance = (np.arange(n) + 0.5) / n
    picked = sampling._pick(np.tile(logits, (1, n, 1)), chance[None], temperature)
    wanted = np.array([0.1, 0.4, 0.2, 0.3]) ** (1 / temperature)
    # An evenly spaced chance meets each share to one count at either end.
    np.testing.assert_allclose(np.bincount(picked[0]), n * wanted / wanted.sum(), atol=1)


def test_a_token_without_a_share_is_never_drawn():
    logits = np.array([-1e9, 0.0, -1e9, 1.0, -1e9], np.float32)
    chance = np.array([[0.0, 0.2, 0.5, 1 - 2**-53]])
    picked = sampling._pick(np.tile(logits, (1, 4, 1)), chance, 1.0)
    np.testing.assert_array_equal(picked, [[1, 1, 3, 3]])


def test_a_low_temperature_takes_the_likeliest():
    model = GPT(SMALL)
    params = parameters(model, 1)
    drawn = draw_tokens(model, params, np.zeros((3, 1)), 9, temperature=1e-6)
    x = np.concatenate([np.zeros((3, 1), np.int64), drawn[:, :-1]], axis=1)[None]
    np.testing.assert_array_equal(model.forward(params, x)[0][0].argmax(-1), drawn)


# ----------------------------------------------------------------------------------------- digits


def test_only_pixels_are_drawn_however_much_the_model_wants_classes():
    model, digits = GPT(DIGITS), Digits()
    params = {name: value.copy() for name, value in parameters(model, 2).items()}
    params["lnf.bias"][:] = 1
    params["head.weight"][:, :10] = 5  # each class is e^240 times as likely as a pixel
    drawing = draw_digits(model, params, digits, per_class=3, seed=1)
    assert drawing.images.shape == (30, 8, 8)
    assert drawing.images.dtype == drawing.labels.dtype == np.int64
    assert drawing.images.min() >= 0
    assert drawing.images.max() <= 16
    np.testing.assert_array_equal(drawing.labels, np.repeat(np.arange(10), 3))


def test_the_class_comes_first():
    # A model whose head echoes the token it sees: pixel 10 + c after class c.
    config = GPTConfig(vocab_size=27, seq_len=64, width=27, heads=1, blocks=1)
    model, digits = GPT(config), Digits()
    params = {name: np.zeros((1, *shape), np.float32) for name, shape in model.shapes.items()}
    params["tok.weight"][0] = np.eye(27)
    params["lnf.weight"][:] = 1
    params["head.weight"][0] = 100 * np.roll(np.eye(27), 10, axis=0)
    drawing = draw_digits(model, params, digits, per_class=2)
    np.testing.assert_array_equal(drawing.images[:, 0, 0], drawing.labels)


# ------------------------------------------------------------------------------------------- text


def test_text_is_continued_in_bytes():
    config = GPTConfig(vocab_size=256, seq_len=12, width=8, heads=2, blocks=1)
    model = GPT(config)
    params = parameters(model, 1)
    drawn = draw_text(model, params, 3, prompt=b"abc")
    assert [len(text) for text in drawn] == [10, 10, 10]
    assert all(isinstance(text, bytes) for text in drawn)
    short = draw_text(model, params, 3, prompt=b"abc", length=4)
    assert short == [text[:4] for text in drawn]
    assert draw_text(model, params, 3, prompt=b"abd") != drawn


# ----------------------------------------------------------------------------------------- errors


def test_what_cannot_be_drawn_is_refused():
    model = GPT(SMALL)
    params = parameters(model, 1)
    start = np.zeros((2, 3))
    for length, said in ((0, "at least 1 token"), (8, "need 10 positions, the model has 9")):
        with pytest.raises(UsageError, match=said):
            draw_tokens(model, params, start, length)
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="temperature must be a positive number"):
            draw_tokens(model, params, start, 2, temperature=temperature)
    with pytest.raises(UsageError, match="per_class must be at least 1 digit, got 0"):
        draw_digits(model, params, SimpleNamespace(CLASSES=10), per_class=0)
    for bad in ({"count": 0}, {"prompt": b""}):
        with pytest.raises(UsageError, match="need a count of at least 1 and a prompt"):
            draw_text(model, params, **bad)
