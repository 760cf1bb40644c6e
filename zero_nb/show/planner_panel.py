"""The planner to play with: widgets where a kernel runs, a slider over pictures where none does.

Both show the same picture, `zero_nb.show.theory_figures.plan_bars`, and the plan's own advice.
"""

import html

from zero_nb.show.slider import still_slider
from zero_nb.show.theory_figures import plan_bars
from zero_nb.theory.plan import ClusterSpec, plan
from zero_nb.theory.presets import DEVICES, MODELS, get_model

__all__ = ["plan_slider", "plan_view", "planner_panel"]

WORLD_SIZES = tuple(2**i for i in range(11))
BATCHES = (1, 2, 4, 8, 16, 32)


def plan_view(model, world_size, device, stage="auto", micro_batch=1, **options):
    """Return a plan's picture and advice as one HTML fragment.

    Parameters
    ----------
    model : str
    world_size : int
    device : str
        A preset.
    stage : int or "auto"
    micro_batch : int
    **options
        As for `zero_nb.theory.plan.plan`.

    Returns
    -------
    str
    """
    return _picture_and_page(model, world_size, device, stage, micro_batch, **options)[1]


def _picture_and_page(model, world_size, device, stage, micro_batch, **options):
    """The picture of a plan, and the page with it and the plan's advice."""
    settings = {"stage": stage, "micro_batch": micro_batch} | options
    cluster = ClusterSpec.of(device, world_size)
    answer = plan(model, cluster, **settings)
    figure = plan_bars(model, cluster, **settings)
    advice = "".join(f"<li>{html.escape(line)}</li>" for line in answer.advice)
    return figure, f"{figure._repr_html_()}<ul>{advice}</ul>"


def planner_panel(model="llama-7b", world_size=8, device="h100-80gb", stage="auto", micro_batch=1):
    """Return a panel of widgets: model, devices, stage, micro-batch; the picture follows.

    Parameters
    ----------
    model, world_size, device, stage, micro_batch
        Where to start.

    Returns
    -------
    ipywidgets.VBox
        Printed as what is chosen and the sentence of the picture: all that is left of it in a page
        without a kernel.
    """
    import ipywidgets as widgets

    class PlannerPanel(widgets.VBox):
        """Widgets above the picture they choose."""

        def __repr__(self):
            chosen = {name: control.value for name, control in self.controls.items()}
            return f"planner panel (run the cell to move it): {chosen}\n{self.figure!r}"

        def _repr_mimebundle_(self, **kwargs):
            """The whole sentence, and the picture for a page without a kernel."""
            bundle = super()._repr_mimebundle_(**kwargs)
            return bundle | {"text/plain": repr(self), "text/html": self.view.value}

    wide = {"description_width": "7em"}
    controls = {
        "model": widgets.Dropdown(
            options=list(MODELS), value=model, description="model", style=wide
        ),
        "world_size": widgets.SelectionSlider(
            options=WORLD_SIZES, value=world_size, description="devices", style=wide,
            continuous_update=False,
        ),
        "device": widgets.Dropdown(
            options=list(DEVICES), value=device, description="device", style=wide
        ),
        "stage": widgets.Dropdown(
            options=["auto", 0, 1, 2, 3], value=stage, description="stage", style=wide
        ),
        "micro_batch": widgets.SelectionSlider(
            options=BATCHES, value=micro_batch, description="micro-batch", style=wide,
            continuous_update=False,
        ),
    }  # fmt: skip
    view = widgets.HTML()

    def draw(_change=None):
        """Draw what the controls say."""
        chosen = {name: control.value for name, control in controls.items()}
        panel.figure, view.value = _picture_and_page(**chosen)

    panel = PlannerPanel([*controls.values(), view])
    panel.controls, panel.view = controls, view
    for control in controls.values():
        control.observe(draw, names="value")
    draw()
    return panel


def plan_slider(model="llama-7b", device="h100-80gb", world_sizes=(1, 2, 4, 8, 16, 32, 64)):
    """Return plans over the number of devices as a slider that needs no kernel.

    Parameters
    ----------
    model, device : str
        Presets.
    world_sizes : sequence of int

    Returns
    -------
    StillSlider
    """
    get_model(model)
    figures = [plan_bars(model, ClusterSpec.of(device, size)) for size in world_sizes]
    return still_slider(figures, world_sizes, f"devices for {model}")
