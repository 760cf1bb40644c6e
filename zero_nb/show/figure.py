"""The figure object: a picture, the sentence that says what it shows, and its numbers.

A picture without its sentence cannot be heard, and without its numbers cannot be checked; so the
three are made together and stay together, on the screen and on disk.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zero_nb.show.style import house_style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure as Sheet

__all__ = ["Figure", "render", "render_stills", "write_manifest"]

SHOWN_ROWS = 40
"""A longer table is cut on the screen; the manifest has all of it."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SHORTEST_ALT = 20


@dataclass(frozen=True, repr=False, eq=False)
class Figure:
    """A finished picture. Make one with `render`.

    Shown in a notebook it is the picture and, folded away, its sentence and its numbers; printed it
    is the sentence. Nothing in it changes afterwards.

    Parameters
    ----------
    png
        The picture in pixels.
    lines
        The same picture as SVG, or what draws it: see `svg`.
    alt
        One or more sentences that say what a reader should see in it.
    data
        The numbers behind it: scalars, sequences and mappings of them, as JSON can hold. NumPy
        arrays and scalars are converted.
    width
        Width on the screen, in CSS pixels.

    Raises
    ------
    ValueError
        If `alt` is no sentence, or a number is not finite.
    TypeError
        If `data` holds something that JSON cannot.
    """

    png: bytes
    lines: str | Callable[[], str]
    alt: str
    data: Mapping[str, Any]
    width: int = 800

    def __post_init__(self) -> None:
        """Refuse a picture without words, and freeze its numbers."""
        alt = " ".join(self.alt.split())
        if len(alt) < _SHORTEST_ALT or not alt.endswith((".", "!", "?")):
            raise ValueError(
                f"alt must be a sentence of at least {_SHORTEST_ALT} characters that says what the "
                f"picture shows and ends with a full stop, got {self.alt!r}"
            )
        if not isinstance(self.data, Mapping):
            raise TypeError(
                f"data must map names to numbers, got {type(self.data).__name__}; "
                "give each series its name"
            )
        object.__setattr__(self, "alt", alt)
        object.__setattr__(self, "data", _frozen("data", self.data))

    @cached_property
    def svg(self) -> str:
        """The picture in lines; deterministic for one version of matplotlib.

        Drawn when it is first asked for: it takes as long as the PNG, and a notebook shows that.
        """
        return self.lines() if callable(self.lines) else self.lines

    def __repr__(self) -> str:
        """The sentence: what a text-only page shows, and what the notebook tests compare."""
        return self.alt

    def _repr_html_(self) -> str:
        """The picture with its sentence; the sentence in view and the numbers are folded away."""
        source = base64.b64encode(self.png).decode("ascii")
        words = html.escape(self.alt)
        # The sentence also in view for those who see the picture and want it in words.
        folded = (
            "<details><summary>This picture in words and numbers</summary>"
            f"<p>{words}</p>{''.join(_tables(self.data))}</details>"
        )
        # White behind the picture, since its ink is dark; all other colours are the page's own.
        return (
            '<figure style="margin: 0.5em 0">'
            f'<img alt="{words}" width="{self.width}" '
            'style="max-width: 100%; height: auto; background: #ffffff" '
            f'src="data:image/png;base64,{source}">'
            f"{folded}</figure>"
        )

    def save(self, directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
        """Write ``name.png`` and ``name.svg``, each in one step: never half a file.

        Parameters
        ----------
        directory
            Made if missing.
        name
            File name without its ending: small letters, digits, ``-`` and ``_``.

        Returns
        -------
        png, svg : Path

        Raises
        ------
        ValueError
            If `name` would not be a portable file name.
        """
        _check_name(name)
        folder = Path(directory)
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        _write(png, self.png)
        _write(svg, self.svg.encode("utf-8"))
        return png, svg


def render(fig: Sheet, alt: str, data: Mapping[str, Any], *, dpi: int = 120) -> Figure:
    """Draw a matplotlib figure into a `Figure`.

    Parameters
    ----------
    fig
        From `zero_nb.show.style.sheet`; call this inside its ``with`` block.
    alt
        What the picture shows, in one or more sentences.
    data
        The numbers behind it, see `Figure`.
    dpi
        Pixels per inch of the PNG.

    Returns
    -------
    Figure
    """
    width = round(fig.get_figwidth() * 100)
    # A first Figure without pixels, so that bad words or numbers are refused before any drawing.
    words = Figure(b"", "", alt, data, width)
    png = io.BytesIO()
    fig.savefig(png, format="png", dpi=dpi, metadata={"Software": None, "Description": words.alt})
    return Figure(png.getvalue(), partial(_drawn_in_lines, fig, words.alt), alt, data, width)


def render_stills(
    fig: Sheet,
    words: Sequence[tuple[str, Mapping[str, Any]]],
    draw: Callable[[int], Sequence[Artist]],
    *,
    dpi: int = 80,
) -> list[Figure]:
    """Draw many pictures that differ in a few things only, as for a slider.

    What stays is drawn once, with its layout, and takes no time in the other pictures.

    Parameters
    ----------
    fig
        From `zero_nb.show.style.sheet`, with all that stays; call this inside its ``with`` block.
    words
        For each picture what `render` takes: the sentence, and the numbers.
    draw
        Adds what belongs to picture `i` to `fig` and returns it, the lowest first. It is drawn
        above all that stays, and taken away again.
    dpi
        Pixels per inch of the PNG.

    Returns
    -------
    list of Figure
    """
    width = round(fig.get_figwidth() * 100)
    checked = [Figure(b"", "", alt, data, width) for alt, data in words]
    fig.set_dpi(dpi)
    canvas: Any = fig.canvas
    canvas.draw()
    fig.set_layout_engine("none")  # it has been laid out; later pictures must not shift
    empty = canvas.copy_from_bbox(fig.bbox)
    figures = []
    for i, picture in enumerate(checked):
        canvas.restore_region(empty)
        artists = draw(i)
        for artist in artists:
            fig.draw_artist(artist)
        png = _encoded(canvas.buffer_rgba(), picture.alt)
        for artist in artists:
            artist.remove()
        lines = partial(_still_in_lines, fig, draw, i, picture.alt)
        figures.append(Figure(png, lines, picture.alt, picture.data, width))
    return figures


def _encoded(pixels: Any, alt: str) -> bytes:
    """A PNG of 256 colours, plenty for flat fills and text: a slider holds dozens of pictures."""
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Description", alt)
    height, width = pixels.shape[:2]
    image = Image.frombuffer("RGBA", (width, height), pixels, "raw", "RGBA", 0, 1).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    file = io.BytesIO()
    few.save(file, "png", pnginfo=info)
    return file.getvalue()


def _still_in_lines(fig: Sheet, draw: Callable[[int], Sequence[Artist]], i: int, alt: str) -> str:
    """Draw picture `i` of a sheet as SVG, and leave the sheet as it was."""
    with house_style():
        artists = draw(i)
    try:
        return _drawn_in_lines(fig, alt)
    finally:
        for artist in artists:
            artist.remove()


def _drawn_in_lines(fig: Sheet, alt: str) -> str:
    """Draw as SVG, in the style in which the pixels were drawn."""
    svg = io.BytesIO()
    with house_style():
        fig.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return _spoken(svg.getvalue().decode("utf-8"), alt)


def write_manifest(directory: str | os.PathLike[str], figures: Mapping[str, Figure]) -> Path:
    """Write ``manifest.json``: for each picture its files, its sentence and its numbers.

    Parameters
    ----------
    directory
        Where the pictures were saved; made if missing.
    figures
        Pictures by the name they were saved under.

    Returns
    -------
    Path
        The manifest. The same pictures give the same bytes.

    Raises
    ------
    ValueError
        If a name would not be a portable file name.
    """
    for name in figures:
        _check_name(name)
    manifest = {
        name: {
            "alt": figure.alt,
            "data": figure.data,
            "png": f"{name}.png",
            "svg": f"{name}.svg",
        }
        for name, figure in sorted(figures.items())
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False, default=dict)
    path = Path(directory) / "manifest.json"
    _write(path, (text + "\n").encode("utf-8"))
    return path


def _check_name(name: str) -> None:
    """Refuse a name that is no portable file name, such as one with a slash or a capital."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a picture's name must be small letters, digits, '-' and '_', got {name!r}"
        )


def _write(path: Path, content: bytes) -> None:
    """Put `content` in place in one step, so that nobody ever reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes the file private; a picture is as public as its folder.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _spoken(svg: str, alt: str) -> str:
    """`svg` with the sentence on its root element, where a screen reader looks for it."""
    head, root, rest = svg.partition("<svg ")
    if not root:
        raise ValueError("this is no SVG: it has no <svg> element")
    return f'{head}{root}role="img" aria-label="{html.escape(alt)}" {rest}'


def _frozen(where: str, value: Any) -> Any:
    """`value` in plain Python, unchangeable and fit for JSON; `where` names it in errors."""
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        value = value.tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; a picture's numbers must be finite")
        return value
    if isinstance(value, Mapping):
        return MappingProxyType(
            {str(key): _frozen(f"{where}[{key!r}]", item) for key, item in value.items()}
        )
    if isinstance(value, Iterable):
        return tuple(_frozen(f"{where}[{i}]", item) for i, item in enumerate(value))
    raise TypeError(f"{where} is a {type(value).__name__}; give numbers, text, sequences, mappings")


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Name and value of every leaf, with the names of the mappings around it."""
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} · ")
        else:
            yield name, value


def _tables(data: Mapping[str, Any]) -> Iterable[str]:
    """Tables of the numbers: first the single ones, then series of one length side by side."""
    single: list[tuple[str, Any]] = []
    series: dict[int, list[tuple[str, Sequence[Any]]]] = {}
    for name, value in _flat(data):
        if not isinstance(value, tuple):
            single.append((name, value))
        elif any(isinstance(item, tuple | Mapping) for item in value):
            single.append((name, f"{len(value)} rows, see the manifest"))
        else:
            series.setdefault(len(value), []).append((name, value))
    if single:
        yield _table(("", "value"), single)
    for length, columns in series.items():
        rows = list(zip(*(column for _, column in columns), strict=True))
        yield _table([name for name, _ in columns], rows[:SHOWN_ROWS])
        if length > SHOWN_ROWS:
            yield f"<p>{length - SHOWN_ROWS} more rows are in the manifest.</p>"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """One HTML table without colours of its own, so that it fits a light and a dark page."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    """One cell. Fractions are marked: their last digit may differ between processors."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return f"<td>{html.escape(str(value))}</td>"
    if isinstance(value, int):
        return f'<td style="text-align: right">{value:,}</td>'
    return f'<td class="zero-nb-fraction" style="text-align: right">{value:.4g}</td>'
