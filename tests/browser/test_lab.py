"""The notebooks as a learner meets them: in JupyterLab, in a browser, by keyboard."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(
    path.relative_to(ROOT / "notebooks").as_posix()
    for folder in ("notebooks", "notebooks/learner")
    for path in (ROOT / folder).glob("*.ipynb")
)

READY = """() => {
  const panel = window.jupyterapp?.shell.currentWidget;
  return Boolean(panel?.sessionContext?.session?.kernel && panel.content?.widgets?.length);
}"""
STARTED = "() => window.jupyterapp.shell.currentWidget.sessionContext.ready.then(() => true)"
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
# The command's own answer misleads; the model says which cells have run and what they gave.
CLEARED = "() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')"
DONE = """() => {
  const cells = window.jupyterapp.shell.currentWidget.model.sharedModel.cells
    .filter(cell => cell.cell_type === 'code' && cell.source.trim());
  return cells.length > 0 && cells.every(cell => cell.execution_count !== null)
    && window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle';
}"""
OUTPUTS = """() => window.jupyterapp.shell.currentWidget.model.sharedModel.cells
  .filter(cell => cell.cell_type === 'code')
  .flatMap(cell => cell.getOutputs().map(output => ({
    type: output.output_type, name: output.name ?? '', error: output.ename ?? ''
  })))"""


def open_notebook(page, lab, name):
    """Open a notebook and wait for its kernel."""
    page.goto(lab(name))
    page.wait_for_function(READY, timeout=90_000)
    page.evaluate(STARTED)


def run_all(page, seconds=120):
    """Run all cells anew and return what kinds of output they gave."""
    page.evaluate(CLEARED)
    page.evaluate(RUN_ALL)
    page.wait_for_function(DONE, timeout=1000 * seconds)
    return page.evaluate(OUTPUTS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_notebook_runs_without_an_error(page, lab, name, tmp_path):
    open_notebook(page, lab, name)
    outputs = run_all(page)
    assert outputs, "no cell gave any output"
    assert [output for output in outputs if output["type"] == "error"] == []
    assert [output for output in outputs if output["name"] == "stderr"] == []
    picture = Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"{name.replace('/', '-')}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000


def test_every_picture_has_words(page, lab):
    open_notebook(page, lab, NOTEBOOKS[0])
    run_all(page)
    images = page.locator(".jp-OutputArea img")
    assert images.count() > 0
    for i in range(images.count()):
        assert len(images.nth(i).get_attribute("alt") or "") > 20
