"""Presets: a model, what it learns from, and the settings it learns well with."""

from dataclasses import dataclass

from zero_nb.train.model import (
    DIGITS,
    DIGITS_TRAINING,
    LESSON,
    LESSON_TRAINING,
    GPTConfig,
    TrainingPreset,
)

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True)
class Preset:
    """A model of digits and how it is trained.

    Attributes
    ----------
    model : GPTConfig
    pooled : bool
        Whether digits are pooled to 4 x 4 pixels.
    training : TrainingPreset
    """

    model: GPTConfig
    pooled: bool
    training: TrainingPreset


PRESETS = {
    "digits": Preset(DIGITS, pooled=False, training=DIGITS_TRAINING),
    "lesson": Preset(LESSON, pooled=True, training=LESSON_TRAINING),
}
"""``digits`` draws digits (62 thousand parameters); ``lesson`` shows memory (405 thousand)."""
