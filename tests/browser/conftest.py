"""A JupyterLab of its own on a copy of the notebooks, and a Chromium to look at it with."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "zero-nb-test"


def _chromium():
    """Return where Chromium is, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Serve a copy of the notebooks; yield the address of JupyterLab."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for path in folder.rglob("*.ipynb"):
        # Without what was stored: every output that is looked at comes from this run.
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = tmp_path_factory.mktemp("home")
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
            *(f"--IdentityProvider.token={TOKEN}", "--expose-app-in-browser"),
            # Nothing is asked of the outside: no news, no extension listing.
            "--LabApp.news_url=None",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            "--LabApp.extension_manager=readonly",
            "--ServerApp.terminals_enabled=False",
            # Nobody edits in it: no copies of what was there before.
            "--FileCheckpoints.checkpoint_dir=" + str(home / "checkpoints"),
        ],
        cwd=folder,
        env=os.environ
        | {
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server)
        yield f"http://127.0.0.1:{port}/lab?token={TOKEN}&reset"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(address, server, seconds=90):
    """Return once the server answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            pytest.fail(f"JupyterLab ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.3)
    pytest.fail(f"JupyterLab did not answer within {seconds} s")


@pytest.fixture(scope="session")
def browser():
    """Start Chromium; skip, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = _chromium()
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium in CI; install Debian's package chromium")
        pytest.skip("no Chromium found; install it, or say where it is in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path,
            args=[
                *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                "--disable-sync",
            ],
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def page(browser, lab):
    """Open JupyterLab once, at a laptop's width; notebooks are opened and closed in it."""
    context = browser.new_context(viewport={"width": 1366, "height": 768})
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(lab)
    page.wait_for_function("() => window.jupyterapp?.restored.then(() => true)")
    page.evaluate(ONE_NOTEBOOK_AND_NOTHING_ELSE)
    yield page
    context.close()


ONE_NOTEBOOK_AND_NOTHING_ELSE = """async () => {
  const { shell, serviceManager } = window.jupyterapp;
  await serviceManager.ready;
  shell.mode = 'single-document';
  shell.collapseLeft();
  shell.collapseRight();
}"""
