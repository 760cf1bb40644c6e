"""The figure object: picture, sentence and numbers stay together."""

import io
import json
import os
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest

from zero_nb.show import style
from zero_nb.show.figure import Figure, render, render_stills, write_manifest

ALT = 'Two bars, "a" is 1 & "b" is <2> bytes high.'
DATA = {
    "world_size": np.int64(4),
    "stage": [0, 1, 2],
    "held_bytes": np.array([1600, 700, 550]),
    "loss": np.array([2.5, 1.25, 0.123456789]),
    "by kind": {"param": [1, 2], "exact": True},
    "drawn": np.zeros((3, 2)),
}


def draw(alt=ALT, data=DATA, height=2.0):
    """A small picture with all that might not be deterministic: text, hatches, clipping, images."""
    with style.sheet(4, height) as (fig, ax):
        ax.bar([0, 1], [1, 2], **style.KINDS["grad"].bar)
        ax.imshow(np.arange(6.0).reshape(2, 3), extent=(0, 1, 0, 1), clip_on=True)
        ax.set_title("Ψ bytes")
        return render(fig, alt, data)


@pytest.fixture(scope="module")
def figure():
    return draw()


class Page(HTMLParser):
    """The tags and texts of a page, in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_printed_it_is_its_sentence(figure):
    assert repr(figure) == ALT
    assert draw(alt="  A sentence \n over  two lines. ").alt == "A sentence over two lines."


def test_in_a_notebook_it_is_picture_sentence_and_numbers(figure):
    page = Page(figure._repr_html_())
    assert page.open == []
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 1
    assert images[0]["alt"] == ALT
    assert images[0]["src"].startswith("data:image/png;base64,iVBORw0KGgo")
    assert images[0]["width"] == "400"
    assert ("details", {}) in page.tags
    for text in ("held_bytes", "1,600", "0.1235", "by kind · param", "True"):
        assert text in page.texts, text
    assert "3 rows, see the manifest" in page.texts


def test_it_brings_no_text_colour_into_a_dark_page(figure):
    for tag, attrs in Page(figure._repr_html_()).tags:
        if tag != "img":
            assert "color" not in attrs.get("style", ""), (tag, attrs)


def test_only_fractions_are_hidden_from_the_notebook_tests(figure):
    cells = [attrs for tag, attrs in Page(figure._repr_html_()).tags if tag == "td"]
    assert sum(attrs.get("class") == "zero-nb-fraction" for attrs in cells) == len(DATA["loss"])


def test_a_long_table_is_cut_and_says_so():
    figure = Figure(b"", "", ALT, {"x": list(range(100))})
    page = Page(figure._repr_html_())
    assert sum(tag == "tr" for tag, _ in page.tags) == 41
    assert "60 more rows are in the manifest." in page.texts


def test_its_sentence_is_folded_away_for_those_who_see_the_picture():
    page = Page(Figure(b"", "", ALT, {})._repr_html_())
    assert ALT in page.texts
    assert "table" not in [tag for tag, _ in page.tags]


def test_the_svg_is_deterministic_spoken_and_undated(figure):
    assert figure.svg == draw().svg
    assert figure.png == draw().png
    root = ET.fromstring(figure.svg)
    assert root.get("aria-label") == ALT
    assert root.get("role") == "img"
    assert "<dc:date>" not in figure.svg


def test_the_png_carries_its_sentence_and_no_version(figure):
    from PIL import Image

    with Image.open(io.BytesIO(figure.png)) as image:
        assert image.size == (480, 240)
        assert image.info["Description"] == ALT
        assert "Software" not in image.info


def test_its_numbers_are_plain_and_cannot_be_changed(figure):
    assert figure.data["held_bytes"] == (1600, 700, 550)
    assert type(figure.data["world_size"]) is int
    with pytest.raises(TypeError):
        figure.data["stage"] = ()
    with pytest.raises(TypeError):
        figure.data["by kind"]["param"] = ()
    with pytest.raises(AttributeError):
        figure.alt = "Another sentence, long enough."


def test_changing_the_source_afterwards_changes_nothing():
    source = {"x": [1, 2]}
    figure = Figure(b"", "", ALT, source)
    source["x"].append(3)
    assert figure.data["x"] == (1, 2)


@pytest.mark.parametrize("alt", ["", "Bars.", "a picture of four bars without an end"])
def test_a_picture_needs_a_sentence(alt):
    with pytest.raises(ValueError, match="alt must be a sentence"):
        draw(alt=alt)


@pytest.mark.parametrize("number", [float("nan"), np.float32("inf")])
def test_numbers_are_finite(number):
    with pytest.raises(ValueError, match=r"data\['loss'\]\[1\] is (nan|inf)"):
        draw(data={"loss": [1.0, number]})


def test_numbers_are_numbers():
    with pytest.raises(TypeError, match=r"data\['x'\] is a object"):
        draw(data={"x": object()})
    with pytest.raises(TypeError, match="data must map names to numbers, got list"):
        draw(data=[1, 2])


def test_saving_writes_both_forms_and_nothing_else(figure, tmp_path):
    png, svg = figure.save(tmp_path / "new" / "folder", "stage-bars_4")
    assert png.read_bytes() == figure.png
    assert svg.read_bytes().decode("utf-8") == figure.svg
    assert sorted(os.listdir(png.parent)) == ["stage-bars_4.png", "stage-bars_4.svg"]


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(figure, tmp_path, monkeypatch):
    figure.save(tmp_path, "bars")

    def fail(source, target):
        raise OSError("disk is gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk is gone"):
        Figure(b"other", "other", ALT, {}).save(tmp_path, "bars")
    assert sorted(os.listdir(tmp_path)) == ["bars.png", "bars.svg"]
    assert (tmp_path / "bars.png").read_bytes() == figure.png


@pytest.mark.parametrize("name", ["", "../bars", "Bars", "a b", "bars.png", "-bars"])
def test_names_are_portable(figure, tmp_path, name):
    with pytest.raises(ValueError, match="a picture's name"):
        figure.save(tmp_path, name)
    with pytest.raises(ValueError, match="a picture's name"):
        write_manifest(tmp_path, {name: figure})
    assert os.listdir(tmp_path) == []


def test_the_manifest_holds_the_numbers_of_every_picture(figure, tmp_path):
    other = Figure(b"", "", "Another picture, without bars.", {"Ψ": 3})
    path = write_manifest(tmp_path, {"b": figure, "a": other})
    manifest = json.loads(path.read_text(encoding="utf-8"))
    assert list(manifest) == ["a", "b"]
    assert manifest["a"] == {
        "alt": other.alt, "data": {"Ψ": 3}, "png": "a.png", "svg": "a.svg",
    }  # fmt: skip
    assert manifest["b"]["data"]["drawn"] == [[0.0, 0.0]] * 3
    assert manifest["b"]["data"]["loss"] == [2.5, 1.25, 0.123456789]
    before = path.read_bytes()
    assert write_manifest(tmp_path, {"a": other, "b": figure}).read_bytes() == before


def stills(words=(("The first of two bars.", {"x": 1}), ("The second of two bars.", {"x": 2}))):
    """Two pictures of one sheet, each with a bar of its own."""
    with style.sheet(4, 2) as (fig, ax):
        ax.set(xlim=(-1, 2), ylim=(0, 2))
        ax.set_title("what stays")
        before = len(fig.findobj())
        drawn = render_stills(fig, words, lambda i: list(ax.bar([i], [i + 1], color="k")), dpi=100)
        assert len(fig.findobj()) == before
        return drawn


def test_stills_are_pictures_of_their_own():
    from PIL import Image

    first, second = stills()
    assert (first.alt, second.data["x"]) == ("The first of two bars.", 2)
    images = [Image.open(io.BytesIO(figure.png)) for figure in (first, second)]
    assert [image.info["Description"] for image in images] == [first.alt, second.alt]
    left, right, title = (0, 20, 200, 200), (200, 20, 400, 200), (0, 0, 400, 20)
    dark = [
        [image.convert("L").crop(part).histogram()[:200] for part in (left, right)]
        for image in images
    ]
    # One bar each: more ink in its half than where the other picture has its bar.
    assert sum(dark[0][0]) > sum(dark[1][0])
    assert sum(dark[1][1]) > sum(dark[0][1])
    strips = [image.convert("RGB").crop(title).tobytes() for image in images]
    assert strips[0] == strips[1]


def test_stills_as_svg_hold_one_bar_each_in_any_order():
    first, second = stills()
    late, early = second.svg, first.svg
    assert [ET.fromstring(svg).get("aria-label") for svg in (early, late)] == [
        "The first of two bars.",
        "The second of two bars.",
    ]
    again = stills()
    assert (again[0].svg, again[1].svg) == (early, late)
    assert early.count("<path") == late.count("<path")


def test_a_still_without_words_is_refused_before_any_drawing():
    with pytest.raises(ValueError, match="alt must be a sentence"):
        stills([("Bars.", {})])
