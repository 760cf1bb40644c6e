"""The zero-nb command: compare stages, train one, draw the figures, open JupyterLab."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from zero_nb.cli_learn import register as register_learn
from zero_nb.cli_plan import register as register_plan
from zero_nb.cluster import launch
from zero_nb.config import PRECISIONS, UsageError, ZeROStage, check_world_size

__all__ = ["app", "main"]

app = typer.Typer(
    name="zero-nb",
    help="ZeRO for real, on a laptop: train under stages 0-3 and measure what each one saves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

register_plan(app)
register_learn(app)

START_PAGE = "index.ipynb"

WorldSize = Annotated[int, typer.Option(help="Number of simulated ranks.")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PrecisionOption = Annotated[str, typer.Option(help=f"Precision recipe: {', '.join(PRECISIONS)}.")]


def main():
    """Run the command line; a `UsageError` becomes one line on stderr and status 2."""
    try:
        status = app(standalone_mode=False)  # typer returns what it would have exited with
        if isinstance(status, int) and status:
            sys.exit(status)
    except UsageError as error:
        _fail(str(error))
    except launch.RunError as error:
        if os.environ.get("ZERO_NB_DEBUG"):
            sys.stderr.write(error.details)
        _fail(str(error), 1)
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # typer raises its own usage errors, whichever click it uses
        shown = getattr(error, "format_message", None)
        if shown is not None:
            _fail(shown(), getattr(error, "exit_code", 2))
        from zero_nb.train.scaling import LossScaleError

        if not isinstance(error, LossScaleError):
            raise
        _fail(str(error), 1)


def _fail(text, status=2):
    """Print one line on stderr (none if help said it all) and exit."""
    if text:
        print(f"zero-nb: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(status)


def _check_folder(out):
    """Refuse a place for files that cannot become one, before minutes are spent on them."""
    nearest = next(path for path in (out, *out.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        what = "is a file" if nearest == out else f"would lie in {nearest}, which is a file"
        raise UsageError(f"--out {out} {what}; give a folder")
    if not os.access(nearest, os.W_OK):
        raise UsageError(f"--out {out}: {nearest} cannot be written to; give another folder")


# --- output helpers ------------------------------------------------------------------------------


@contextmanager
def _progress(total, description):
    """Yield a callable to tick after each step: a bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    hidden = not (sys.stdout.isatty() and sys.stderr.isatty())
    with tqdm(total=total, desc=description, disable=hidden, leave=False, unit="step") as bar:
        yield lambda *_: bar.update()


def _print_table(header, body, title):
    """Print rows of text as a table; as wide as it needs where nobody sets a width."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for row in body:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table)


def _print_json(value):
    """Print one JSON document."""
    print(json.dumps(value, indent=1, allow_nan=False))


# --- commands ------------------------------------------------------------------------------------


@app.command(epilog="Example: zero-nb compare --world-size 8 --precision fp32")
def compare(
    world_size: WorldSize = 4,
    steps: Steps = 30,
    precision: PrecisionOption = "bf16",
    as_json: AsJson = False,
):
    """Train stages 0-3 on the same digits and print what each rank held and sent."""
    from zero_nb.compare import compare_stages

    check_world_size(world_size)
    with _progress(4 * max(steps, 1), "stages 0-3") as tick:
        comparison = compare_stages(world_size, steps, precision, progress=tick)
    if as_json:
        _print_json(comparison.to_json())
    else:
        _print_comparison(comparison)


def _print_comparison(comparison):
    """Print the table of stages and what it shows."""
    header, body = comparison.rows()
    _print_table(
        header,
        body,
        f"Bytes and elements per rank: {comparison.world_size} ranks, {comparison.precision}, "
        f"{comparison.numel:,} parameters, {comparison.steps} steps",
    )
    print(
        "The four stages end with the same weights, to the bit."
        if comparison.same_weights
        else "The stages end with DIFFERENT weights; this is a bug, please report it."
    )


@app.command(
    epilog="Example: zero-nb train --stage 3 --world-size 4 --steps 400, "
    "or zero-nb train --data README.md --stage 2 --json, or zero-nb train --engine mpi, "
    "or zero-nb train --steps 400 --save DIR --save-every 50, and after an interruption the same "
    "with --resume DIR"
)
def train(
    stage: Annotated[str, typer.Option(help="ZeRO stage: 0, 1, 2 or 3.")] = "3",
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks; 4, or as many as a launcher started.")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Training steps of the whole run, those before --resume included.")
    ] = 100,
    precision: PrecisionOption = "bf16",
    data: Annotated[str, typer.Option(help="digits, or a file to read as bytes.")] = "digits",
    optimizer: Annotated[
        str, typer.Option(help="adamw, adam, sgd or momentum (SGD with momentum 0.9).")
    ] = "adamw",
    batch: Annotated[
        int | None, typer.Option(help="Samples of a step, over all ranks; 32 by default.")
    ] = None,
    micro_batches: Annotated[
        int, typer.Option(help="Gradient accumulation: backward passes in one step.")
    ] = 1,
    reduce_dtype: Annotated[
        str | None, typer.Option(help="Format gradients travel in, if not the recipe's own.")
    ] = None,
    reduce_bucket_size: Annotated[
        int | None, typer.Option(help="Elements reduced together; by default each unit alone.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Reduce gradients while the next are computed.")
    ] = False,
    prefetch_bucket_size: Annotated[
        int, typer.Option(help="Stage 3: elements gathered ahead; 1 is one unit.")
    ] = 0,
    param_persistence_threshold: Annotated[
        int, typer.Option(help="Stage 3: units of at most so many parameters stay gathered.")
    ] = 0,
    max_live_parameters: Annotated[
        int | None, typer.Option(help="Stage 3: elements that may be gathered at a time.")
    ] = None,
    max_reuse_distance: Annotated[
        int, typer.Option(help="Stage 3: keep a unit if its next use is so few elements away.")
    ] = 0,
    reshard_after_forward: Annotated[
        bool, typer.Option(help="Stage 3: drop units between the forward and backward pass.")
    ] = True,
    link_bandwidth: Annotated[
        float | None,
        typer.Option(help="Emulated link: bytes a second that a rank sends; holds messages up."),
    ] = None,
    link_latency: Annotated[
        float, typer.Option(help="Emulated link: seconds a message takes to start.")
    ] = 0.0,
    trace: Annotated[
        Path | None,
        typer.Option(help="File for what happened when (Chrome trace JSON, open in Perfetto)."),
    ] = None,
    trace_steps: Annotated[int, typer.Option(help="With --trace: steps to record.")] = 3,
    save: Annotated[
        Path | None, typer.Option(help="Directory for a checkpoint after the last step.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="With --save: and after each so many steps.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="With --save: sharded, a file a rank, or consolidated.")
    ] = "sharded",
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on from what --save wrote there, at any stage and world size."),
    ] = None,
    schedule_steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of the learning-rate schedule, if the run is to go on after --steps."
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="simulated: all ranks in this process; mpi: real processes.")
    ] = "simulated",
    local_ranks: Annotated[int, typer.Option(help="With mpi: ranks hosted by each process.")] = 1,
    deadline: Annotated[
        float, typer.Option(help="With mpi: seconds a rank waits for another before all end.")
    ] = 120.0,
    time_limit: Annotated[
        float | None, typer.Option(help="With mpi: seconds after which the run is ended.")
    ] = None,
    as_json: AsJson = False,
):
    """Train a GPT at one stage, then let it draw digits (or write text)."""
    chosen = ZeROStage.parse(stage)
    if engine not in ("simulated", "mpi"):
        raise UsageError(f"unknown engine {engine!r}; choose simulated or mpi")
    link = _link(engine, link_bandwidth, link_latency)
    if engine == "mpi" and not launch.under_launcher():
        with _progress(max(steps, 1), f"stage {int(chosen)}") as tick:
            launch.run_mpi(
                sys.argv[1:], world_size or 4, local_ranks, time_limit_s=time_limit, progress=tick
            )
        return
    settings = {
        "precision": precision,
        "optimizer": optimizer,
        "batch": batch,
        "micro_batches": micro_batches,
        "reduce_dtype": reduce_dtype,
        "reduce_bucket_size": reduce_bucket_size,
        "overlap_comm": overlap,
        "prefetch_bucket_size": prefetch_bucket_size,
        "param_persistence_threshold": param_persistence_threshold,
        "max_live_parameters": max_live_parameters,
        "max_reuse_distance": max_reuse_distance,
        "reshard_after_forward": reshard_after_forward,
    }
    told = overlap or prefetch_bucket_size > 0 or link is not None or trace is not None
    saving = {
        "trace": trace,
        "trace_steps": trace_steps,
        "save": save,
        "save_every": save_every,
        "layout": layout,
        "resume": resume,
        "schedule_steps": schedule_steps,
    }
    with _world(engine, world_size, local_ranks, deadline, link) as world:
        run, samples, processes, predicted = _train(
            world, chosen, data, steps, settings, saving, measured=engine == "mpi", told=told
        )
        saved = None if save is None else _saved(save)
        if as_json:
            more = {"processes": processes} if processes else {}
            more |= {"checkpoint": saved} if saved else {}
            more |= {"overlap": run.overlap_to_json() | predicted} if told else {}
            _print_json(run.to_json() | {"samples": samples} | more)
        else:
            _print_run(run, samples, processes)
            if told:
                print(f"\n{_overlap_text(run, link, engine, predicted)}")
            if trace is not None:
                print(f"trace {trace}: open it at ui.perfetto.dev")
            if saved:
                print(f"saved {saved['path']} ({saved['layout']}, {saved['bytes']:,} bytes)")


def _link(engine, bytes_per_s, latency_s):
    """Return the emulated link, if one was asked for."""
    if bytes_per_s is None:
        if latency_s:
            raise UsageError("--link-latency needs --link-bandwidth, in bytes a second")
        return None
    if engine == "mpi":
        raise UsageError("--link-bandwidth emulates a link between simulated ranks; leave it out")
    from zero_nb.cluster.simulated import EmulatedLink

    return EmulatedLink(bytes_per_s, latency_s)


def _overlap_text(run, link, engine, predicted):
    """Say how much communication was hidden behind computing, and what the schedule predicts."""
    took = f"messages took {run.comm_seconds * 1e3:.2f} ms of a step ({run.step_seconds * 1e3:.2f})"
    if engine == "mpi":
        lines = [f"{took}; over MPI each is waited for where it is issued"]
    elif link is None:
        lines = [f"{took}; without a link there is nothing to hide: they are copies in memory"]
    else:
        hidden = 1 - run.exposed_seconds / run.comm_seconds if run.comm_seconds else 0.0
        lines = [
            f"on an emulated link of {link.bytes_per_s:,.0f} bytes/s and {link.latency_s:g} s "
            f"{took}; {max(hidden, 0.0):.0%} of that was hidden behind computing"
        ]
    served = ", ".join(f"{count} {name}" for name, count in run.fetches.items() if count)
    lines += [f"units fetched in the last step: {served}"] if served else []
    if predicted:
        lines.append(
            f"a step as scheduled: peak {predicted['predicted_peak_bytes']:,} bytes, "
            f"{predicted['predicted_elements']:,} elements sent (measured {run.peak_bytes:,} and "
            f"{run.elements_sent:,})"
        )
    return "\n".join(lines)


@contextmanager
def _world(engine, world_size, local_ranks, deadline, link):
    """Yield the world to train in."""
    if engine == "simulated":
        from zero_nb.cluster.simulated import SimulatedWorld

        yield SimulatedWorld(4 if world_size is None else world_size, link=link)
    else:
        launch.share_cores()
        from zero_nb.cluster.joined import joined

        with joined(local_ranks, world_size=world_size, deadline_s=deadline) as world:
            yield world


def _saved(directory):
    """Return what was saved, as JSON can hold it."""
    from zero_nb.train.checkpoint import read_info

    info = read_info(directory)
    return {"path": str(info.path), "layout": info.layout, "bytes": info.nbytes}


def _train(world, stage, data, steps, settings, saving, *, measured, told):
    """Train; return the run, samples, if `measured` what each process sent and held, and if `told`
    what the schedule says of a step.
    """
    from zero_nb.compare import digits_task, text_task, train_stage

    task = digits_task() if data == "digits" else text_task(data)
    trace = _ready(world, stage, settings) if measured else None
    with _progress(max(steps, 1), f"stage {int(stage)}") as tick:

        def progress(report):
            tick()
            if trace is not None:
                trace.after_step()
                world.member.tick(loss=report.loss)

        run, trained = train_stage(
            stage, steps=steps, task=task, world=world, progress=progress, **settings, **saving
        )
    processes = [] if trace is None else world.process_figures(trace.stop())
    first_only = {"recording": True} if run.steps == 1 else {}
    predicted = _predicted(trained, task, settings | first_only) if told else {}
    return run, _samples(trained, task), processes, predicted


def _predicted(engine, task, settings):
    """Return what the schedule says of a step; nothing for what it does not know."""
    from zero_nb.overlap import predicted_step

    settings = dict(settings)
    batch = settings.pop("batch") or task.training.batch
    if settings.pop("reduce_dtype") is not None:
        return {}
    step = predicted_step(engine, batch, **settings)
    return {"predicted_peak_bytes": step.peak_bytes, "predicted_elements": step.elements_sent()}


def _ready(world, stage, settings):
    """Load the kernels, on each machine one process first; begin to trace what training takes."""
    from zero_nb.cluster.joined import PeakTrace
    from zero_nb.compare import load_kernels

    if world.first_here:
        load_kernels(stage, **settings)  # compiled at most once, the others find it in the cache
    world.barrier("the kernels")
    if not world.first_here:
        load_kernels(stage, **settings)
    return PeakTrace()


def _print_run(run, samples, processes):
    """Print what a run measured, and what it drew."""
    title = f"Stage {run.stage}, {run.world_size} ranks, {run.precision}: per rank"
    _print_table(*_run_rows(run), title)
    if processes:
        _print_table(*_process_rows(processes), "Bytes of each process, measured")
    print(f"loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, held out {run.held_out_loss:.4f}")
    print(f"weights {run.weights_sha256}")
    for sample in samples[:3]:
        print(f"\n{sample['prompt']!r}:")
        print(_picture(sample["levels"]) if "levels" in sample else sample["text"])


def _run_rows(run):
    """Return a table of one run, one row a kind."""
    header = ("", "held bytes", "formula", "padding")
    body = [
        (
            kind,
            *(f"{part[kind]:,}" for part in (run.held_bytes, run.formula_bytes, run.padding_bytes)),
        )
        for kind in run.held_bytes
    ]
    body.append(("peak", f"{run.peak_bytes:,}", "", ""))
    body.append(("elements sent a step", f"{run.elements_sent:,}", f"{run.formula_elements:,}", ""))
    return header, body


def _process_rows(processes):
    """Return a table of what each process sent and held, one row a process."""
    header = ("process", "ranks", "host", "to MPI", "between own ranks", "traced peak", "resident")
    body = [
        (
            str(told["process"]),
            " ".join(map(str, told["ranks"])),
            told["host"],
            f"{sum(told['mpi_bytes'].values()):,}",
            f"{sum(told['local_bytes'].values()):,}",
            f"{told['tracemalloc_peak_bytes']:,}",
            "" if told["resident_bytes"] is None else f"{told['resident_bytes']:,}",
        )
        for told in processes
    ]
    return header, body


def _samples(engine, task):
    """Let the trained model draw one digit a class, or write a few lines."""
    from zero_nb.train.data import Digits
    from zero_nb.train.sampling import draw_digits, draw_text

    with engine.optimizer.gathered_parameters() as params:
        if 0 not in engine.world.ranks:
            return []
        if isinstance(task.dataset, Digits):
            drawing = draw_digits(
                task.model,
                params,
                task.dataset,
                per_class=1,
                temperature=task.training.temperature,
            )
            return [
                {"prompt": str(int(label)), "levels": image.tolist()}
                for label, image in zip(drawing.labels, drawing.images, strict=True)
            ]
        texts = draw_text(task.model, params, 2)
    return [{"prompt": "\n", "text": text.decode("utf-8", "replace")} for text in texts]


def _picture(levels):
    """Return grey levels 0-16 as lines of characters, two a pixel."""
    shades = " .:-=+*#%@"
    return "\n".join(
        "".join(shades[min(level * len(shades) // 17, 9)] * 2 for level in row) for row in levels
    )


@app.command(epilog="Example: zero-nb figures --out figures")
def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to; made if missing.")] = Path(
        "figures"
    ),
):
    """Measure, and write every figure as PNG and SVG with the numbers behind it."""
    from zero_nb.show.gallery import STEPS, draw_all

    _check_folder(out)
    with _progress(STEPS, "figures") as tick:
        for name in draw_all(out, progress=tick):
            print(out / f"{name}.png")


@app.command(epilog="Example: zero-nb run --out figures")
def run(
    out: Annotated[Path, typer.Option(help="Folder for the figures; made if missing.")] = Path(
        "figures"
    ),
):
    """Compare the stages, train at stage 3 until the GPT draws digits, write the figures."""
    from zero_nb.show.gallery import main_job

    _check_folder(out)
    main_job(out, say=print, show=_print_comparison, progress=_progress)
    print("\nNow open the notebooks in JupyterLab: make lab   (or: zero-nb lab)")


@app.command(epilog="Example: zero-nb lab")
def lab():
    """Open JupyterLab at the notebooks."""
    if find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is not installed; run: pip install 'zero-nb[lab]'")
    command = [sys.executable, "-m", "jupyterlab", START_PAGE]
    sys.exit(subprocess.call(command, cwd=_notebook_folder()))


def _notebook_folder():
    """Return the folder with the notebooks: here, or in the checkout this runs from."""
    for base in (Path.cwd(), Path(__file__).resolve().parent.parent):
        if (base / "notebooks").is_dir():
            return base / "notebooks"
    raise UsageError("no notebooks folder here; run zero-nb lab in a checkout of the project")
