"""The notebooks as a learner meets them: in JupyterLab, in a browser, by keyboard.

JupyterLab is opened once and each notebook is opened in it, run from the first cell to the last,
looked at, and closed with its kernel: most of the time is the notebooks' own.
"""

import os
import re
from pathlib import Path

import pytest

import nbtools

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path.relative_to(ROOT / "notebooks").as_posix()
    for folder in ("notebooks", "notebooks/learner")
    for path in (ROOT / folder).glob("*.ipynb")
)
if os.environ.get("EDITIONS") == "learner":
    # Of two editions only what a learner opens; see .ci/run.
    NOTEBOOKS = [name for name in NOTEBOOKS if f"learner/{name}" not in NOTEBOOKS]

# Open a notebook and wait for its kernel. Old outputs go, so that none can pass for a new one.
OPEN = """async path => {
  const { commands } = window.jupyterapp;
  const panel = await commands.execute('docmanager:open', { path, factory: 'Notebook' });
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  await commands.execute('notebook:clear-all-cell-outputs');
  window.panel = panel;
}"""
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
# The command's own answer misleads; the model says which cells have run.
DONE = """() => window.panel.sessionContext.session.kernel.status === 'idle'
  && window.panel.model.sharedModel.cells.every(cell =>
    cell.cell_type !== 'code' || !cell.source.trim() || cell.execution_count !== null)"""
OUTPUTS = """() => window.panel.model.sharedModel.cells
  .filter(cell => cell.cell_type === 'code')
  .flatMap(cell => cell.getOutputs())"""
CLOSE = """async () => {
  await window.panel.sessionContext.shutdown();
  window.panel.context.model.dirty = false;  // nothing is asked before it closes
  window.panel.dispose();
}"""


@pytest.fixture
def opened(page):
    """Give a function that opens a notebook; close what it has opened."""
    was_opened = []

    def open_notebook(name):
        page.evaluate(OPEN, name)
        was_opened.append(name)

    yield open_notebook
    if was_opened:
        page.evaluate(CLOSE)


def run_all(page, seconds=120):
    """Run all cells and return their outputs."""
    page.evaluate(RUN_ALL)
    page.wait_for_function(DONE, timeout=1000 * seconds, polling=100)
    return page.evaluate(OUTPUTS)


def text_of(data):
    """A text that may be held as a list of lines."""
    return data if isinstance(data, str) else "".join(data)


# JupyterLab keeps only the cells in view in the page: go to each output that holds a mark.
PLACES = """mark => window.panel.model.sharedModel.cells.flatMap((cell, i) =>
  cell.cell_type === 'code' && JSON.stringify(cell.getOutputs()).includes(mark) ? [i] : [])"""
GO_TO = """async place => {
  const notebook = window.panel.content;
  notebook.activeCellIndex = place;
  await notebook.scrollToItem(place, 'start');
}"""


def outputs_with(page, mark):
    """Go to each cell whose output holds a mark; yield where it is on the page."""
    for place in page.evaluate(PLACES, mark):
        page.evaluate(GO_TO, place)
        cell = page.locator(f'.jp-Cell[data-windowed-list-index="{place}"]')
        cell.wait_for()
        yield cell


def step_through(page, cell):
    """Step through a slider's pictures by keyboard; each is seen alone, with its own words."""
    slider, box = cell.get_by_role("slider"), cell.locator("[data-zero-nb-slider]")
    last = int(slider.get_attribute("max"))
    slider.focus()
    page.keyboard.press("Home")
    seen = []
    for _ in range(last + 1):
        pictures = box.locator("img:visible")
        assert pictures.count() == 1
        seen.append(
            (
                pictures.get_attribute("alt"),
                pictures.get_attribute("src"),
                slider.get_attribute("aria-valuetext"),
                box.locator("output").inner_text(),
            )
        )
        page.keyboard.press("ArrowRight")
    assert [len(set(what)) for what in zip(*seen, strict=True)] == 4 * [last + 1]
    page.keyboard.press("ArrowLeft")
    assert box.locator("img:visible").get_attribute("alt") == seen[-2][0]
    assert slider.evaluate("input => document.activeElement === input")


def plan_by_keyboard(page, cell):
    """Ask the planner's panel for more devices by keyboard, and wait for the new picture."""
    picture = cell.locator("img")
    before = picture.get_attribute("alt")
    assert "on 8 devices" in before
    cell.get_by_role("slider").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "([image, before]) => image.isConnected ? image.alt !== before : true",
        arg=[picture.element_handle(), before],
    )
    assert "on 16 devices" in cell.locator("img").get_attribute("alt")


def test_there_is_something_to_move():
    pages = {name: (ROOT / "notebooks" / name).read_text(encoding="utf-8") for name in NOTEBOOKS}
    name_of_six = "06_stage_3_shard_the_parameters.ipynb"
    editions = [name.removesuffix(name_of_six) for name in pages if name.endswith(name_of_six)]
    assert editions
    for edition in editions:
        six = pages[edition + name_of_six]
        assert six.count("<div data-zero-nb-slider>") == 2
        assert "planner panel" in pages[f"{edition}01_where_the_bytes_go.ipynb"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_runs_without_an_error(page, opened, name, tmp_path):
    opened(name)
    outputs = run_all(page)
    assert outputs, "no cell gave any output"
    assert [output for output in outputs if output["output_type"] == "error"] == []
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    pages = [text_of(output.get("data", {}).get("text/html", "")) for output in outputs]
    for picture in re.findall(r"<img [^>]*>", "".join(pages)):
        words = re.search(r'alt="([^"]*)"', picture)
        assert words, "a picture without words"
        assert len(words[1]) >= nbtools.SHORTEST_ALT
    for cell in outputs_with(page, "data-zero-nb-slider"):
        step_through(page, cell)
    for cell in outputs_with(page, "planner panel"):
        plan_by_keyboard(page, cell)
    picture = Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"{name.replace('/', '-')}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000
