"""Find an exercise or a prediction by its key: ``"04-a"`` is exercise a of notebook 04."""

import importlib
import importlib.util
import pkgutil
from functools import cache
from types import ModuleType

import zero_nb.learn as package
from zero_nb.config import UsageError
from zero_nb.learn.predict import PREDICTIONS

__all__ = ["exercise_keys", "find_exercise", "find_prediction", "has_check", "keys_of", "notebooks"]


def find_exercise(key):
    """Return the `Exercise` of a key.

    Raises
    ------
    UsageError
        If there is none: a slip of the notebook, not of an answer.
    """
    found = getattr(_module(key), "EXERCISES", {}).get(key)
    if found is None:
        raise UsageError(f"there is no exercise {key!r}; there are {', '.join(exercise_keys())}")
    return found


def has_check(key):
    """Whether there is an `Exercise` of this key (bool)."""
    return key in getattr(_module(key), "EXERCISES", {})


def find_prediction(key):
    """Return the `Prediction` of a key.

    Raises
    ------
    KeyError
        If there is none: a slip of the notebook, not of a guess.
    """
    if key in PREDICTIONS:
        return PREDICTIONS[key]
    return getattr(_module(key), "PREDICTIONS", {})[key]


@cache
def notebooks():
    """Return the numbers of the notebooks that have exercises (tuple of str)."""
    prefix = "exercises_"
    found = {
        name.removeprefix(prefix).upper()
        for _, name, _ in pkgutil.iter_modules(package.__path__)
        if name.startswith(prefix)
    }
    return tuple(sorted(found | {key.split("-")[0] for key in PREDICTIONS}))


def exercise_keys():
    """Return the key of every exercise that has a check, in order (list of str)."""
    return [key for number in notebooks() for key in getattr(_module(number), "EXERCISES", {})]


def keys_of(notebook):
    """Return the keys of one notebook, guesses and exercises, in the order of their letters.

    Parameters
    ----------
    notebook : str
        Such as ``"04"`` or ``"A"``.

    Returns
    -------
    list of str
    """
    module = _module(notebook)
    keys = [key for key in PREDICTIONS if key.split("-")[0] == notebook]
    for table in ("PREDICTIONS", "EXERCISES"):
        keys += getattr(module, table, {})
    return sorted(set(keys))


def _module(key):
    """The module with a notebook's exercises, or an empty one."""
    number = str(key).split("-")[0].lower()
    name = f"zero_nb.learn.exercises_{number}"
    if number.isalnum() and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    return ModuleType("empty")
