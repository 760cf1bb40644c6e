"""The house style: things can be told apart, text can be read, units are honest."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_nb.show import style


def luminance(color):
    """Relative luminance, written from WCAG 2.1 once more."""
    out = 0.0
    for weight, place in ((0.2126, 1), (0.7152, 3), (0.0722, 5)):
        c = int(color[place : place + 2], 16) / 255
        out += weight * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
    return out


def contrast(a, b):
    """WCAG 2.1 contrast ratio, from 1 to 21."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_kind_has_its_own_colour_and_its_own_hatch():
    looks = list(style.KINDS.values())
    assert list(style.KINDS) == [
        "param", "grad", "optim", "activation", "bucket", "unsharded", "workspace",
    ]  # fmt: skip
    for field in ("label", "color", "hatch"):
        assert len({getattr(look, field) for look in looks}) == len(looks), field


def test_every_stage_has_its_own_colour_hatch_and_line():
    assert [look.label for look in style.STAGES] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    for a, b in itertools.combinations(style.STAGES, 2):
        assert a.color != b.color
        assert a.hatch != b.hatch
        assert (a.dash, a.linewidth) != (b.dash, b.linewidth)


def test_seventy_ranks_look_different_and_neighbours_differ_in_both():
    looks = [style.rank_look(rank) for rank in range(70)]
    assert len({(look.color, look.hatch) for look in looks}) == 70
    for a, b in itertools.pairwise(looks):
        assert a.color != b.color
        assert a.hatch != b.hatch
    with pytest.raises(ValueError, match="rank must not be negative, got -1"):
        style.rank_look(-1)


def test_palette_is_petroffs():
    matplotlib_style = pytest.importorskip("matplotlib.style")
    cycle = matplotlib_style.library["petroff10"]["axes.prop_cycle"]
    assert list(style.PETROFF10) == cycle.by_key()["color"]


@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_text_can_be_read_on_any_background(channels):
    background = "#{:02x}{:02x}{:02x}".format(*channels)
    assert contrast(style.text_color(background), background) >= 4.5


@pytest.mark.parametrize("color", [*style.PETROFF10, "#ffffff", "#000000"])
def test_a_lines_label_can_be_read_on_paper(color):
    with style.sheet() as (_, ax):
        text = style.label_line(ax, 1.0, 2.0, "here", color)
    assert contrast(text.get_color(), "#ffffff") >= 4.5


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (1, "1 B", "1 B"),
        (999, "999 B", "999 B"),
        (1000, "1.00 kB", "1000 B"),
        (1024, "1.02 kB", "1.00 KiB"),
        (9_994, "9.99 kB", "9.76 KiB"),
        (9_996, "10.0 kB", "9.76 KiB"),
        (99_949, "99.9 kB", "97.6 KiB"),
        (99_960, "100 kB", "97.6 KiB"),
        (999_499, "999 kB", "976 KiB"),
        (999_500, "1.00 MB", "976 KiB"),
        (120_000_000_000, "120 GB", "112 GiB"),
        (16 * 1024**3, "17.2 GB", "16.0 GiB"),
        (2.5e18, "2500 PB", "2220 PiB"),
        (-1_620_000, "-1.62 MB", "-1.54 MiB"),
        (0.25, "0.25 B", "0.25 B"),
    ],
)
def test_bytes_are_written_with_an_honest_unit(count, decimal, binary):
    assert style.format_bytes(count) == decimal
    assert style.format_bytes(count, binary=True) == binary


def test_bytes_axis_drops_idle_zeros():
    with style.sheet() as (fig, ax):
        ax.set_ylim(0, 2_000_000)
        ax.set_yticks([0, 500_000, 1_000_000, 1_500_000])
        style.bytes_axis(ax.yaxis)
        fig.canvas.draw()
        labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["0", "500 kB", "1 MB", "1.5 MB"]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12), st.floats(0.01, 100))
def test_spread_keeps_the_order_and_the_gap(positions, gap):
    moved = style.spread(positions, gap)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    for a, b in itertools.pairwise(order):
        assert moved[b] - moved[a] >= gap * (1 - 1e-9) - 1e-9
    # As little as possible: the labels as a whole are not pushed to one side.
    assert sum(moved) == pytest.approx(sum(positions), abs=1e-6)


def test_spread_leaves_alone_what_is_far_apart():
    assert style.spread([5.0, 1.0, 9.0], 2.0) == [5.0, 1.0, 9.0]
    assert style.spread([1.0, 1.0, 9.0], 2.0) == [0.0, 2.0, 9.0]


def test_bar_labels_stand_inside_their_bar_or_nowhere():
    with style.sheet() as (_, ax):
        ax.set_ylim(0, 100)
        high, low = ax.bar([0, 1], [60, 3], **style.KINDS["param"].bar)
        text = style.label_bar(ax, high, "60 B")
        assert style.label_bar(ax, low, "3 B") is None
    assert text.get_position() == (0.0, 30.0)
    fill = style.KINDS["param"].color
    assert contrast(text.get_color(), fill) >= 4.5


def test_the_style_leaves_no_trace():
    import matplotlib

    before = dict(matplotlib.rcParams)
    with style.sheet(nrows=2, ncols=3, sharey=True) as (_, axes):
        assert axes.shape == (2, 3)
        assert matplotlib.rcParams["hatch.linewidth"] == 0.6
    assert dict(matplotlib.rcParams) == before
