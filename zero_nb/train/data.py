"""What the models learn from: handwritten digits as tokens, and any file as bytes.

Shapes: n samples, T positions of the model. A sample is T + 1 tokens: the model sees the first T
and predicts the last T.

A batch is a function of (step, size, seed) and of nothing else. It is the global batch, so a run
sees the same samples on any number of ranks, and can be resumed from the step alone.
"""

import gzip
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np

from zero_nb.config import UsageError

__all__ = ["DataError", "Dataset", "Digits", "Recognition", "TextBytes", "wilson_interval"]


class DataError(UsageError):
    """A data file that cannot be trained on; the text says why and what would do."""


class Dataset(ABC):
    """Token sequences to learn from, and some that are held out.

    Attributes
    ----------
    name : str
    vocab_size : int
        Tokens are 0 … vocab_size - 1.
    seq_len : int
        T, the number of positions a model needs.
    """

    name: str
    vocab_size: int
    seq_len: int

    @property
    @abstractmethod
    def train_samples(self):
        """Number of training samples (int)."""

    @property
    @abstractmethod
    def held_out_samples(self):
        """Number of held-out samples (int)."""

    @abstractmethod
    def _train_tokens(self, index):
        """Training samples by number, (len(index), T + 1) int64."""

    @abstractmethod
    def _held_out_tokens(self, index):
        """Held-out samples by number, (len(index), T + 1) int64."""

    def batch(self, step, size, seed=0):
        """Return the global batch of a step.

        Samples come in an endless row of epochs, each a permutation of all training samples of
        its own; batch `step` is samples step * size … (step + 1) * size - 1 of that row.

        Parameters
        ----------
        step : int
            Counted from 0.
        size : int
            Samples in a batch, over all ranks.
        seed : int

        Returns
        -------
        inputs, targets : ndarray of int64, shape (size, T)
            ``targets[:, t]`` is the token that follows ``inputs[:, t]``.

        Raises
        ------
        UsageError
            If step or seed is negative or size is not positive.
        """
        for name, value, least in (("step", step, 0), ("size", size, 1), ("seed", seed, 0)):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        start, count = step * size, self.train_samples
        first, last = start // count, (start + size - 1) // count
        row = np.concatenate(
            [np.random.default_rng([seed, e]).permutation(count) for e in range(first, last + 1)]
        )
        skip = start - first * count
        return _inputs_and_targets(self._train_tokens(row[skip : skip + size]))

    def held_out(self, limit=None):
        """Return samples that no batch contains.

        Parameters
        ----------
        limit : int, optional
            At most so many, evenly spaced; all by default.

        Returns
        -------
        inputs, targets : ndarray of int64, shape (n, T)

        Raises
        ------
        UsageError
            If limit is not positive.
        """
        count = self.held_out_samples
        if limit is not None and limit < 1:
            raise UsageError(f"limit must be at least 1 sample, got {limit}")
        chosen = count if limit is None else min(limit, count)
        return _inputs_and_targets(self._held_out_tokens(np.arange(chosen) * count // chosen))

    @cached_property
    def unigram_entropy(self):
        """Entropy of the held-out targets' frequencies, in nats (float).

        The lowest held-out loss of a model that ignores what came before: a model that has
        learned lies below.
        """
        counts = np.bincount(self.held_out()[1].reshape(-1))
        share = counts[counts > 0] / counts.sum()
        return float(-np.sum(share * np.log(share)))


def _inputs_and_targets(tokens):
    """Split (n, T + 1) tokens into two contiguous (n, T) arrays, the second one token ahead."""
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


# ---------------------------------------------------------------------------------------------
# Digits
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recognition:
    """How many drawn digits a classifier took for what they were meant to be.

    Attributes
    ----------
    correct, total : int
    low, high : float
        95 % Wilson interval of the share.
    """

    correct: int
    total: int
    low: float
    high: float

    @property
    def accuracy(self):
        """Share recognised (float)."""
        return self.correct / self.total

    def __str__(self):
        return (
            f"{self.correct} of {self.total} recognised: {self.accuracy:.1%} "
            f"(95 % interval {self.low:.1%} to {self.high:.1%})"
        )


def wilson_interval(successes, trials, z=1.959963984540054):
    """Return the Wilson score interval of a proportion.

    Parameters
    ----------
    successes, trials : int
    z : float
        Standard normal quantile; 1.96 gives 95 %.

    Returns
    -------
    low, high : float

    Raises
    ------
    UsageError
        Unless 0 <= successes <= trials and trials > 0.

    References
    ----------
    Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927), 209-212.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise UsageError(f"need 0 <= successes <= trials and trials > 0, got {successes}, {trials}")
    share = successes / trials
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    low, high = (middle - spread) / scale, (middle + spread) / scale
    # At 0 and 1 a bound is the share itself; rounding may put it on the wrong side.
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def _table_of_digits():
    """Return scikit-learn's digits, ``(1797, 65)`` int64: 64 grey levels and the class.

    Its file is read where it lies, because importing its reader takes most of a second, and every
    notebook would wait for it. A release that keeps the file elsewhere is asked in the usual way.
    """
    package = find_spec("sklearn")
    if package is not None and package.origin is not None:
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.loadtxt(lines, delimiter=",", dtype=np.int64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.int64)


@final
class Digits(Dataset):
    """scikit-learn's handwritten digits, one token for the class and one for each pixel.

    Tokens 0 … 9 are the classes, 10 … 26 the 17 grey levels 0 … 16. A sample is the class token
    and then the pixels row by row, so that a model that has learned can draw a class. The split
    is always the same: every sixth sample of each class is held out (300 of 1,797).

    Parameters
    ----------
    pooled : bool
        Average each 2 x 2 pixels, which leaves 4 x 4: short sequences for lessons about memory.

    Attributes
    ----------
    side : int
        Pixels along an edge, 8 or 4.

    References
    ----------
    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998 (the test part), as bundled with scikit-learn.
    """

    CLASSES = 10
    LEVELS = 17
    vocab_size = CLASSES + LEVELS

    def __init__(self, pooled=False):
        table = _table_of_digits()
        images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
        if pooled:
            images = (images.reshape(-1, 4, 2, 4, 2).sum(axis=(2, 4)) + 2) // 4
        self.name = "digits pooled to 4 x 4" if pooled else "digits"
        self.side = images.shape[1]
        self.seq_len = self.side**2
        order = np.random.default_rng(0).permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        held = np.zeros(len(labels), bool)
        held[order[::6]] = True
        self.train_images, self.train_labels = images[~held], labels[~held]
        self.held_out_images, self.held_out_labels = images[held], labels[held]

    @property
    def train_samples(self):
        """Number of training samples (int)."""
        return len(self.train_labels)

    @property
    def held_out_samples(self):
        """Number of held-out samples (int)."""
        return len(self.held_out_labels)

    def _train_tokens(self, index):
        return self.encode(self.train_images[index], self.train_labels[index])

    def _held_out_tokens(self, index):
        return self.encode(self.held_out_images[index], self.held_out_labels[index])

    def encode(self, images, labels):
        """Return tokens ``(n, T + 1)`` int64 of grey levels ``(n, side, side)`` and classes."""
        pixels = np.reshape(images, (len(images), -1)) + self.CLASSES
        return np.concatenate([np.reshape(labels, (-1, 1)), pixels], axis=1).astype(np.int64)

    def decode(self, tokens):
        """Return grey levels ``(n, side, side)`` of pixel tokens ``(n, T)``.

        Raises
        ------
        UsageError
            If a token is not a pixel's.
        """
        tokens = np.asarray(tokens)
        if tokens.size and not (tokens.min() >= self.CLASSES and tokens.max() < self.vocab_size):
            raise UsageError(
                f"pixel tokens are {self.CLASSES} to {self.vocab_size - 1}, "
                f"got {tokens.min()} to {tokens.max()}"
            )
        return tokens.reshape(-1, self.side, self.side) - self.CLASSES

    @cached_property
    def _classifier(self):
        """A nearest-neighbour classifier that has seen the training digits only."""
        from sklearn.neighbors import KNeighborsClassifier

        model = KNeighborsClassifier(n_neighbors=1, algorithm="brute")
        return model.fit(self._flat(self.train_images), self.train_labels)

    @staticmethod
    def _flat(images):
        """(n, side, side) levels as (n, side * side) floats, for scikit-learn."""
        return np.reshape(images, (len(images), -1)).astype(np.float64)

    def classify(self, images):
        """Return the class of the nearest training digit for each image.

        Parameters
        ----------
        images : ndarray, shape (n, side, side)
            Grey levels 0 … 16.

        Returns
        -------
        ndarray of int64, shape (n,)

        Raises
        ------
        UsageError
            If the shape is another.
        """
        images = np.asarray(images)
        if images.ndim != 3 or images.shape[1:] != (self.side, self.side):
            raise UsageError(
                f"images must have shape (n, {self.side}, {self.side}), got {images.shape}"
            )
        return self._classifier.predict(self._flat(images))

    def recognise(self, images, labels):
        """Return a `Recognition`: how often `classify` finds the class an image was meant to be.

        Parameters
        ----------
        images : ndarray, shape (n, side, side)
        labels : ndarray of int, shape (n,)

        Raises
        ------
        UsageError
            If there are no images, or another number of labels.
        """
        if len(images) == 0 or len(images) != len(labels):
            raise UsageError(f"need a label for each image, got {len(images)}, {len(labels)}")
        correct = int(np.sum(self.classify(images) == np.asarray(labels)))
        return Recognition(correct, len(labels), *wilson_interval(correct, len(labels)))


# ---------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------


@final
class TextBytes(Dataset):
    """A file as a row of bytes, each a token; its last tenth is held out.

    Samples start every `seq_len` bytes, so that each byte but the first is predicted once an
    epoch. Bytes at the end that do not fill a sample are left out.

    Parameters
    ----------
    path : str or path-like
        Any file: text in any encoding, or no text at all.
    seq_len : int

    Raises
    ------
    DataError
        If the file is missing, a directory, unreadable, empty, or has less than two samples: one
        to learn from, one to hold out.
    UsageError
        If seq_len is not positive.
    """

    vocab_size = 256

    def __init__(self, path, seq_len=64):
        if seq_len < 1:
            raise UsageError(f"seq_len must be at least 1 byte, got {seq_len}")
        self.name = Path(path).name
        self.seq_len = int(seq_len)
        content = _read(Path(path))
        sample = self.seq_len + 1
        if len(content) < 2 * sample:
            raise DataError(
                f"{path} has {len(content)} bytes, but two sequences of {sample} are needed, one "
                "to learn from and one to hold out; use a longer file"
            )
        held = max(len(content) // 10, sample)
        self._train, self._held_out = content[:-held], content[-held:]

    @property
    def train_samples(self):
        """Number of training samples (int)."""
        return (len(self._train) - 1) // self.seq_len

    @property
    def held_out_samples(self):
        """Number of held-out samples (int)."""
        return (len(self._held_out) - 1) // self.seq_len

    def _train_tokens(self, index):
        return self._windows(self._train, index)

    def _held_out_tokens(self, index):
        return self._windows(self._held_out, index)

    def _windows(self, content, index):
        """T + 1 bytes from every T-th byte on."""
        at = np.asarray(index)[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return content[at].astype(np.int64)


def _read(path):
    """Return the bytes of a file as uint8, or say why there are none."""
    if path.is_dir():
        raise DataError(f"{path} is a directory; give a file to train on")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}; give a file to train on") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not content:
        raise DataError(f"{path} is empty; give a file with something to learn from")
    return np.frombuffer(content, np.uint8)
