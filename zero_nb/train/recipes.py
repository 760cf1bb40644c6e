"""Precision recipes: in which format each kind of model state is kept."""

from dataclasses import dataclass, replace

from zero_nb.config import UsageError, check_precision
from zero_nb.core.precision import BFLOAT16, FLOAT16, FLOAT32, Format, get_format

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
        Gradients while they are held. With several micro-batches they are held, and added, in
        float32 whatever this says.
    wire : Format
        Gradients while they travel (the reduce dtype); sums are taken in float32 and rounded to
        it once. Equal to `grad`, or narrower.
    master : bool
        Whether the optimizer keeps its own float32 copy. Without one (fp32) the rule updates
        the working parameters in place.
    both_grads : bool
        Whether the 16-bit gradient is kept beside the float32 one until the step (6 bytes).
    loss_scaling : bool
        Whether small gradients would underflow without a loss scale (float16).
    """

    name: str
    param: Format
    grad: Format
    wire: Format
    master: bool
    both_grads: bool = False
    loss_scaling: bool = False

    def with_wire(self, reduce_dtype):
        """Return the recipe with another reduce dtype.

        Parameters
        ----------
        reduce_dtype : str or Format, or None
            None keeps the recipe's own.

        Raises
        ------
        UsageError
            If it is wider than the gradients held, or another 16-bit format; or if it leaves no
            16-bit gradient to keep beside the float32 one (`both_grads`).
        """
        if reduce_dtype is None:
            return self
        try:
            wire = get_format(reduce_dtype)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if wire != self.grad and self.grad != FLOAT32:
            raise UsageError(
                f"reduce dtype {wire.name} does not fit gradients held in {self.grad.name}; "
                "use a recipe with float32 gradients, such as bf16-fp32-grads"
            )
        if self.both_grads and wire == FLOAT32:
            raise UsageError(
                f"reduce dtype {wire.name} leaves {self.name} no 16-bit gradient to keep beside "
                "the float32 one; use bf16-fp32-grads"
            )
        return replace(self, wire=wire)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", FLOAT32, FLOAT32, FLOAT32, master=False),
        Recipe("bf16", BFLOAT16, BFLOAT16, BFLOAT16, master=True),
        Recipe("bf16-fp32-grads", BFLOAT16, FLOAT32, FLOAT32, master=True),
        Recipe("bf16-both-grads", BFLOAT16, FLOAT32, BFLOAT16, master=True, both_grads=True),
        Recipe("fp16", FLOAT16, FLOAT16, FLOAT16, master=True, loss_scaling=True),
    )
}
"""Bytes a parameter with Adam: 16, 16, 18, 20, 16."""


def get_recipe(name, reduce_dtype=None):
    """Return the recipe called `name`; a `UsageError` lists the names otherwise."""
    check_precision(name)
    return RECIPES[name].with_wire(reduce_dtype)
