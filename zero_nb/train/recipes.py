"""Precision recipes: in which format each kind of model state is kept."""

from dataclasses import dataclass

from zero_nb.config import check_precision
from zero_nb.core.precision import BFLOAT16, FLOAT32, Format

__all__ = ["RECIPES", "Recipe", "get_recipe"]


@dataclass(frozen=True)
class Recipe:
    """How parameters, gradients and the optimizer's copy are stored.

    Attributes
    ----------
    name : str
    param : Format
        The working parameters: what is gathered and computed with.
    grad : Format
        Gradients while they are held.
    wire : Format
        Gradients while they travel; sums are taken in float32 and rounded to it once.
    master : bool
        Whether the optimizer keeps its own float32 copy. Without one (fp32) the rule updates
        the working parameters in place.
    """

    name: str
    param: Format
    grad: Format
    wire: Format
    master: bool


RECIPES = {
    "fp32": Recipe("fp32", FLOAT32, FLOAT32, FLOAT32, master=False),
    "bf16": Recipe("bf16", BFLOAT16, BFLOAT16, BFLOAT16, master=True),
}


def get_recipe(name):
    """Return the recipe called `name`; a `UsageError` lists the names otherwise."""
    check_precision(name, tuple(RECIPES))
    return RECIPES[name]
