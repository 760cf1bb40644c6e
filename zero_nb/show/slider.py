"""A slider over pictures that are drawn already: it needs no kernel and works in a static page.

The arrow keys move it. Without scripts (an untrusted notebook, a text browser) the first picture
and every sentence are there all the same.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from zero_nb.config import UsageError
from zero_nb.show.figure import Figure

__all__ = ["StillSlider", "still_slider"]

_COUNT = itertools.count(1)

# Shows one picture of a group, and says its name aloud and beside the slider.
_SCRIPT = (
    "const box=this.closest('[data-zero-nb-slider]');"
    "box.querySelectorAll('[data-step]').forEach((step,i)=>{step.hidden=i!=this.value});"
    "const name=this.dataset.names.split('|')[this.value];"
    "box.querySelector('output').textContent=name;"
    "this.setAttribute('aria-valuetext',name)"
)


@dataclass(frozen=True, repr=False)
class StillSlider:
    """Pictures, one at a time. Make one with `still_slider`.

    Attributes
    ----------
    figures : tuple of Figure
    names : tuple of str
        What the slider says at each picture.
    label : str
        What is changed.
    start : int
        The picture shown first.
    """

    figures: tuple[Figure, ...]
    names: tuple[str, ...]
    label: str
    start: int = 0

    def __repr__(self) -> str:
        """Every sentence: what a text-only page shows, and what the notebook tests compare."""
        lines = [f"{self.label}, a slider over {len(self.figures)} pictures:"]
        lines += [f"{name}: {fig!r}" for name, fig in zip(self.names, self.figures, strict=True)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The slider and all pictures, all but one hidden."""
        number = next(_COUNT)
        names = html.escape("|".join(self.names))
        steps = "".join(
            f"<div data-step{'' if i == self.start else ' hidden'}>{figure._repr_html_()}</div>"
            for i, figure in enumerate(self.figures)
        )
        return (
            f'<div data-zero-nb-slider><label for="zero-nb-slider-{number}">'
            f"{html.escape(self.label)}</label> "
            f'<input id="zero-nb-slider-{number}" type="range" min="0" '
            f'max="{len(self.figures) - 1}" value="{self.start}" step="1" '
            'style="width: min(24em, 60%); vertical-align: middle" '
            f'data-lm-suppress-shortcuts="true" data-names="{names}" '
            f'aria-valuetext="{html.escape(self.names[self.start])}" '
            f'oninput="{html.escape(_SCRIPT)}"> '
            f"<output>{html.escape(self.names[self.start])}</output>{steps}</div>"
        )


def still_slider(
    figures: Sequence[Figure], names: Sequence[object], label: str, *, start: int = 0
) -> StillSlider:
    """Put pictures under one slider.

    Parameters
    ----------
    figures
        At least two.
    names
        What the slider says at each; one a picture, without ``|``.
    label
        What is changed, such as ``"world size"``.
    start
        The picture shown first.

    Returns
    -------
    StillSlider

    Raises
    ------
    UsageError
        If there are too few pictures, another number of names, or no picture `start`.
    """
    texts = tuple(str(name) for name in names)
    if len(figures) < 2:
        raise UsageError(f"a slider needs at least two pictures, got {len(figures)}")
    if len(texts) != len(figures):
        raise UsageError(f"{len(figures)} pictures need as many names, got {len(texts)}")
    if any("|" in text for text in texts):
        raise UsageError(f"names must not hold '|', got {', '.join(texts)}")
    if not 0 <= start < len(figures):
        raise UsageError(f"start must be within 0..{len(figures) - 1}, got {start}")
    return StillSlider(tuple(figures), texts, label, start)
