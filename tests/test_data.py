"""Digits and text as tokens: what a batch is, what is held out, who is recognised."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from zero_nb.config import UsageError
from zero_nb.train import data as data_module
from zero_nb.train.data import DataError, Digits, TextBytes, wilson_interval
from zero_nb.train.model import DIGITS, LESSON


@pytest.fixture(scope="module")
def digits():
    return Digits()


@pytest.fixture(scope="module")
def pooled():
    return Digits(pooled=True)


@pytest.fixture
def text(tmp_path):
    """A file of 230 bytes, each pair of neighbours unlike the others; 13 + 1 bytes a sample."""
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(230)))
    return TextBytes(path, seq_len=13)


@pytest.fixture(params=["digits", "pooled", "text"])
def dataset(request):
    return request.getfixturevalue(request.param)


# -------------------------------------------------------------------------------- every data set


def test_targets_are_the_inputs_one_token_on(dataset):
    for inputs, targets in (dataset.batch(3, 5, seed=2), dataset.held_out()):
        assert inputs.shape == targets.shape == (len(inputs), dataset.seq_len)
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.flags.c_contiguous
        assert targets.flags.c_contiguous
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        assert min(inputs.min(), targets.min()) >= 0
        assert max(inputs.max(), targets.max()) < dataset.vocab_size


def test_a_batch_depends_on_step_size_and_seed_only(dataset):
    first = dataset.batch(4, 6, seed=1)
    dataset.batch(0, 3, seed=9)
    np.testing.assert_array_equal(first, dataset.batch(4, 6, seed=1))
    assert (first[0] != dataset.batch(5, 6, seed=1)[0]).any()
    assert (first[0] != dataset.batch(4, 6, seed=2)[0]).any()


def test_batches_are_cut_from_one_row(dataset):
    small = [dataset.batch(step, 4) for step in range(15)]
    large = [dataset.batch(step, 12) for step in range(5)]
    for which in (0, 1):
        np.testing.assert_array_equal(
            np.concatenate([batch[which] for batch in small]),
            np.concatenate([batch[which] for batch in large]),
        )


def test_each_epoch_has_each_sample_once_in_another_order(dataset):
    count = dataset.train_samples
    # In one piece, although batches reach from one epoch into the next.
    inputs, targets = dataset.batch(0, 3 * count, seed=5)
    rows = [bytes(row) for row in np.concatenate([inputs, targets[:, -1:]], 1).astype(np.uint8)]
    epochs = [rows[e * count : (e + 1) * count] for e in range(3)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(set(epochs[0])) > 0.98 * count


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((-1, 4, 0), "step must be at least 0, got -1"),
        ((0, 0, 0), "size must be at least 1, got 0"),
        ((0, 4, -3), "seed must be at least 0, got -3"),
    ],
)
def test_an_impossible_batch_is_refused(text, arguments, said):
    with pytest.raises(UsageError, match=said):
        text.batch(*arguments)


def test_some_of_the_held_out_samples_are_evenly_spaced(dataset):
    inputs, targets = dataset.held_out()
    assert len(inputs) == dataset.held_out_samples
    np.testing.assert_array_equal(dataset.held_out(limit=10**6)[1], targets)
    if len(inputs) == 300:
        np.testing.assert_array_equal(dataset.held_out(limit=50)[0], inputs[::6])
    assert len(dataset.held_out(limit=1)[0]) == 1
    with pytest.raises(UsageError, match="limit must be at least 1 sample, got 0"):
        dataset.held_out(limit=0)


def test_unigram_entropy_is_that_of_the_held_out_targets(dataset):
    counts = Counter(dataset.held_out()[1].reshape(-1).tolist())
    total = sum(counts.values())
    wanted = -sum(n / total * math.log(n / total) for n in counts.values())
    assert dataset.unigram_entropy == pytest.approx(wanted, rel=1e-12)


# ---------------------------------------------------------------------------------------- digits


def test_every_sixth_digit_of_a_class_is_held_out(digits):
    assert (digits.train_samples, digits.held_out_samples) == (1497, 300)
    bunch = load_digits()
    together = np.concatenate([digits.train_images, digits.held_out_images])
    assert Counter(map(bytes, together.astype(np.uint8))) == Counter(
        map(bytes, bunch.images.astype(np.uint8))
    )
    for label in range(10):
        share = np.mean(bunch.target == label)
        assert abs(np.sum(digits.held_out_labels == label) - 300 * share) < 1.5


def test_held_out_digits_are_in_no_batch(digits):
    inputs, targets = digits.batch(0, digits.train_samples)
    seen = set(map(bytes, targets.astype(np.uint8)))
    held = list(map(bytes, digits.held_out()[1].astype(np.uint8)))
    # All 1,797 images differ, so equal pixels would mean the same sample.
    assert seen.isdisjoint(held)
    assert inputs[:, 0].max() < 10


def test_tokens_and_images_tell_the_same(digits):
    tokens = digits.encode(digits.held_out_images, digits.held_out_labels)
    inputs, targets = digits.held_out()
    np.testing.assert_array_equal(tokens[:, :-1], inputs)
    np.testing.assert_array_equal(inputs[:, 0], digits.held_out_labels)
    assert (targets.min(), targets.max()) == (10, 26)
    np.testing.assert_array_equal(digits.decode(targets), digits.held_out_images)
    for token in (9, 27):
        with pytest.raises(UsageError, match="pixel tokens are 10 to 26"):
            digits.decode(np.full((1, 64), token))


def test_pooling_averages_and_rounds(digits, pooled):
    assert pooled.side == 4
    for large, small in zip(digits.train_images[:40], pooled.train_images[:40], strict=True):
        for i in range(4):
            for j in range(4):
                mean = large[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean()
                assert small[i, j] == math.floor(mean + 0.5)
    np.testing.assert_array_equal(digits.train_labels, pooled.train_labels)
    assert pooled.train_images.max() == 16


def test_the_model_presets_fit_the_digits(digits, pooled):
    for config, data in ((DIGITS, digits), (LESSON, pooled)):
        assert (config.vocab_size, config.seq_len) == (data.vocab_size, data.seq_len)


def test_the_classifier_knows_digits_it_has_not_seen_and_not_noise(digits, pooled):
    assert digits.recognise(digits.held_out_images, digits.held_out_labels).accuracy > 0.97
    assert pooled.recognise(pooled.held_out_images, pooled.held_out_labels).accuracy > 0.85
    labels = np.repeat(np.arange(10), 50)
    noise = np.random.default_rng(0).integers(0, 17, (500, 8, 8))
    lucky = digits.recognise(noise, labels)
    assert lucky.low < 0.1 < lucky.high
    shifted = (digits.held_out_labels + 1) % 10
    assert digits.recognise(digits.held_out_images, shifted).correct <= 9


def test_recognition_reads_as_a_sentence(digits):
    found = digits.recognise(digits.train_images[:20], digits.train_labels[:20])
    assert (found.correct, found.total) == (20, 20)
    assert str(found) == "20 of 20 recognised: 100.0% (95 % interval 83.9% to 100.0%)"


def test_images_of_another_shape_are_refused(digits):
    with pytest.raises(UsageError, match=r"images must have shape \(n, 8, 8\), got \(3, 64\)"):
        digits.classify(np.zeros((3, 64)))
    with pytest.raises(UsageError, match="need a label for each image, got 2, 3"):
        digits.recognise(np.zeros((2, 8, 8)), [1, 2, 3])
    with pytest.raises(UsageError, match="need a label for each image, got 0, 0"):
        digits.recognise(np.zeros((0, 8, 8)), [])


@given(st.integers(1, 2000), st.data())
def test_wilson_bounds_solve_wilsons_equation(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = wilson_interval(successes, trials)
    share = successes / trials
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        # (share - p)^2 = z^2 p (1 - p) / n
        z2 = 1.959963984540054**2
        left = (share - bound) ** 2
        assert left == pytest.approx(z2 * bound * (1 - bound) / trials, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_an_impossible_proportion_is_refused(successes, trials):
    with pytest.raises(UsageError, match="need 0 <= successes <= trials"):
        wilson_interval(successes, trials)


# ------------------------------------------------------------------------------------------ text


def test_text_is_cut_every_seq_len_bytes_and_its_end_held_out(text):
    # 23 bytes are a tenth: one sample of 14. The other 207 hold 15 samples: 15 * 13 + 1 = 196.
    assert (text.train_samples, text.held_out_samples) == (15, 1)
    inputs, targets = text.held_out()
    np.testing.assert_array_equal(inputs, [range(207, 220)])
    np.testing.assert_array_equal(targets, [range(208, 221)])
    starts = sorted(text.batch(0, 15)[0][:, 0].tolist())
    assert starts == list(range(0, 195, 13))
    assert (text.name, text.vocab_size) == ("text.bin", 256)


def test_the_shortest_file_has_one_sample_to_learn_and_one_to_hold_out(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(bytes(range(28)))
    text = TextBytes(path, 13)
    np.testing.assert_array_equal(text.batch(7, 2)[0], [range(13)] * 2)
    np.testing.assert_array_equal(text.held_out()[0], [range(14, 27)])


def test_any_bytes_are_text(tmp_path):
    path = tmp_path / "noise"
    content = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    path.write_bytes(content.tobytes())
    text = TextBytes(str(path), 16)
    assert text.held_out_samples == (500 - 1) // 16
    np.testing.assert_array_equal(text.held_out()[1].reshape(-1), content[4501 : 4501 + 31 * 16])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; give a file"),
        (b"x" * 27, "has 27 bytes, but two sequences of 14 are needed"),
    ],
)
def test_a_file_too_short_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        TextBytes(path, 13)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        TextBytes(tmp_path / "absent")
    with pytest.raises(DataError, match="is a directory"):
        TextBytes(tmp_path)
    (tmp_path / "file").write_bytes(b"x" * 500)
    with pytest.raises(DataError, match=r"cannot read|there is no file"):
        TextBytes(tmp_path / "file" / "below")
    with pytest.raises(UsageError, match="seq_len must be at least 1 byte, got 0"):
        TextBytes(tmp_path / "file", 0)


def test_digits_are_those_that_scikit_learn_gives(monkeypatch):
    """Read from its file, or asked of it where the file is not: the same table."""
    bunch = load_digits()
    for found in (True, False):
        if not found:
            monkeypatch.setattr(data_module, "find_spec", lambda name: None)
        table = data_module._table_of_digits()
        assert table.dtype == np.int64
        assert np.array_equal(table[:, :-1], bunch.data)
        assert np.array_equal(table[:, -1], bunch.target)
