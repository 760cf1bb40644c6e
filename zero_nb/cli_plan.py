"""The commands ``zero-nb plan`` and ``zero-nb tables``: from words to a plan, from a plan to text.

`plan_command` and `tables_command` work on plain arguments and return what is to be shown, so that
they can be used and tested without a terminal; `register` adds them to the command line.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_nb.config import UsageError
from zero_nb.theory.activations import EXECUTIONS, LOSSES, RECOMPUTES
from zero_nb.theory.frameworks import FRAMEWORKS
from zero_nb.theory.memory import OPTIMIZERS, PRECISIONS
from zero_nb.theory.peak import LINES, OFFLOADS
from zero_nb.theory.plan import ClusterSpec, Plan, plan
from zero_nb.theory.presets import DEVICES, get_model
from zero_nb.theory.sizes import format_gb_gib, parse_count, parse_size
from zero_nb.theory.specs import ModelSpec, gpt_like, llama_like, load_config
from zero_nb.theory.tables import TABLES, Table, make_table

__all__ = ["plan_command", "register", "tables_command"]

_WIDE = 200  # columns where nobody sets a width, so that nothing wraps in a file


# --- from words to a plan ------------------------------------------------------------------------


def plan_command(
    *,
    model: str | None = None,
    params: str | None = None,
    config: str | Path | None = None,
    shape: Mapping[str, Any] | None = None,
    world_size: int = 1,
    device: str | None = None,
    device_memory: str | None = None,
    stage: str = "auto",
    batch: int = 1,
    seq: int | None = None,
    states_only: bool = False,
    **options: Any,
) -> Plan:
    """Plan from what was typed.

    Parameters
    ----------
    model, params, config, shape
        Exactly one: a preset's name, a number of parameters (``7.5e9``), a ``config.json``, or
        numbers (`layers`, `hidden`, `heads` and more).
    world_size : int
    device, device_memory : str
        A preset's name, a size such as ``80GB`` or ``80GiB``; memory overrides the preset's.
    stage : str
        ``auto`` or 0–3.
    batch : int
        Micro-batch of one device.
    seq : int, optional
    states_only : bool
    **options
        As for `zero_nb.theory.plan.plan`; those that are None are left out.

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        In one line, with what to do.
    """
    given = {"--model": model, "--params": params, "--config": config, "--layers": shape}
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        found = " and ".join(named) or "none"
        raise UsageError(
            f"give exactly one of --model, --params, --config and --layers; got {found}"
        )
    memory = None if device_memory is None else parse_size(device_memory, "--device-memory")
    cluster = (
        ClusterSpec.of(device, world_size, memory) if device else ClusterSpec(world_size, memory)
    )
    offload = frozenset(options.pop("offload", None) or ())
    chosen = {name: value for name, value in options.items() if value is not None}
    return plan(
        _model(model, params, config, shape),
        cluster,
        stage=_stage(stage),
        seq=seq,
        micro_batch=batch,
        states_only=states_only,
        offload=offload,
        **chosen,
    )


def _stage(text: str) -> int | str:
    """``auto``, or a stage's number."""
    word = str(text).strip().lower()
    if word == "auto":
        return word
    if word not in ("0", "1", "2", "3"):
        raise UsageError(f"--stage must be auto, 0, 1, 2 or 3, got {text!r}")
    return int(word)


def _model(model, params, config, shape) -> ModelSpec | int:
    """The model in whichever way it was given."""
    if model:
        return get_model(model)
    if params:
        return parse_count(params, "--params")
    if config:
        return load_config(config)
    return _shape({name: value for name, value in shape.items() if value is not None})


def _shape(numbers: dict[str, Any]) -> ModelSpec:
    """A shape by its numbers; grouped queries or an own width of the feed-forward make a LLaMA."""
    missing = [name for name in ("layers", "hidden", "heads") if name not in numbers]
    if missing:
        needed = ", ".join("--" + name for name in missing)
        raise UsageError(f"a shape by its numbers also needs {needed}")
    llama = numbers.pop("llama", False)
    tied = numbers.pop("tied", None)
    if not llama:
        return gpt_like(**numbers, **({} if tied is None else {"tied": tied}))
    numbers.setdefault("ffn", 4 * numbers["hidden"])
    return llama_like(**numbers, tied=bool(tied))


def tables_command(name: str) -> Table:
    """A table by its name; see `zero_nb.theory.tables.TABLES`."""
    return make_table(name)


# --- from a plan to text -------------------------------------------------------------------------


def _console():
    """A console as wide as the terminal, or wide enough for a file."""
    from rich.console import Console

    # Without markup: a model's name or a path may hold brackets.
    return Console(width=None if sys.stdout.isatty() else _WIDE, highlight=False, markup=False)


def _grid(title: str, columns, rows, right=()):
    """A rich table."""
    from rich import box
    from rich.table import Table as RichTable

    table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _print_plan(answer: Plan) -> None:
    """Print a plan for people."""
    console = _console()
    console.print(
        f"{answer.model}: {answer.numel:,} parameters, {answer.world_size} devices, "
        f"stage {answer.stage}, {answer.precision}",
        style="bold",
    )
    console.print(_stages_table(answer))
    if not answer.states_only:
        console.print(_lines_table(answer))
    for line in _facts(answer):
        console.print(line)
    console.print()
    for line in answer.advice:
        console.print(f"- {line}")


def _stages_table(answer: Plan):
    """The four stages side by side."""
    sizes = ("bytes", "GB", "GiB")
    kinds = ("param", "grad", "optim") if answer.states_only else ()
    rows = []
    for row in answer.stages:
        total = row["total_bytes"]
        mark = {True: "yes", False: "no", None: "-"}[row["fits"]]
        cells = [f"{row['bytes'][kind] / 1e9:,.2f}" for kind in kinds]
        chosen = "->" if row["stage"] == answer.stage else ""
        rows.append(
            (chosen, str(row["stage"]), *cells, f"{total:,}", f"{total / 1e9:,.2f}",
             f"{total / 2**30:,.2f}", mark)
        )  # fmt: skip
    parts = tuple(f"{kind} GB" for kind in kinds)
    what = "model states" if answer.states_only else "the largest moment"
    return _grid(
        f"\nBytes of the fullest device, {what}",
        ("", "stage", *parts, *sizes, "fits"),
        rows,
        right=(*parts, *sizes),
    )


def _lines_table(answer: Plan):
    """Every line of the largest moment."""
    total = answer.total_bytes
    lines = [(name, LINES[name], count) for name, count in answer.lines.items()]
    lines += [
        ("fragmentation", "fragmentation", answer.bytes["fragmentation"]),
        ("CUDA context and NCCL", "context", answer.bytes["context"]),
        ("total", "", total),
    ]
    rows = [
        (
            name,
            kind,
            f"{count:,}",
            f"{count / 1e9:,.2f}",
            f"{count / 2**30:,.2f}",
            f"{count / total:.1%}",
        )
        for name, kind, count in lines
    ]
    return _grid(
        f"Stage {answer.stage} at its largest moment: {answer.moment}",
        ("line", "kind", "bytes", "GB", "GiB", "share"),
        rows,
        right=("bytes", "GB", "GiB", "share"),
    )


def _facts(answer: Plan):
    """The rest of the answer, one fact a line."""
    if answer.device_bytes is not None:
        yield f"device              {format_gb_gib(answer.device_bytes)}"
        yield f"smallest stage      {_or_none(answer.smallest_stage)}"
        yield f"smallest world size {_or_none(answer.smallest_world_size)}"
        yield f"largest model       {_or_none(answer.largest_numel)} parameters"
    if answer.largest_micro_batch:
        yield f"largest micro-batch {answer.largest_micro_batch:,}"
    yield f"elements sent       {answer.elements_sent:,} a device and step"
    if answer.time:
        bound, plain = answer.time.bound_s, answer.time.without_overlap_s
        yield (
            f"step time           at least {bound:.3g} s ({answer.time.limit}), "
            f"{plain:.3g} s without overlap, at peak speeds"
        )
    if not answer.states_only:
        for name, (low, _, high) in answer.range_bytes.items():
            span = format_gb_gib(low)
            if high > low:
                span += f" to {format_gb_gib(high)}"
            yield f"{name:19} {span}"
        moments = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in answer.moments.items())
        yield f"moments, GB         {moments}"
        if len(answer.pipeline) > 1:
            stages = ", ".join(f"{row['total_bytes'] / 1e9:,.1f}" for row in answer.pipeline)
            yield f"pipeline, GB        {stages}"


def _or_none(value) -> str:
    """A number, or that there is none."""
    return "none" if value is None else f"{value:,}"


def _print_table(table: Table) -> None:
    """Print a table for people."""
    console = _console()
    numbers = {
        name
        for name in table.columns
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in table.column(name))
    }
    rows = [tuple(_cell(value) for value in row) for row in table.rows]
    console.print(_grid(table.title, table.columns, rows, right=numbers))
    console.print(f"Source: {table.source}")
    for note in table.notes:
        console.print(f"Note: {note}")
    if "same" in table.columns:
        same = table.column("same")
        console.print(f"{sum(same)} of {len(same)} rows agree with what was printed")


def _cell(value) -> str:
    """One cell as text."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}" if abs(value) < 1e9 else f"{value:,.1f}".removesuffix(".0")
    return "" if value is None else str(value)


# --- the command line ----------------------------------------------------------------------------


def _names(known) -> str:
    """Names for a help text."""
    return ", ".join(known)


def register(app: typer.Typer) -> None:
    """Add ``plan`` and ``tables`` to a typer application.

    Parameters
    ----------
    app : typer.Typer
        Whoever runs it turns a `UsageError` into one line and a status that is not 0.
    """
    app.command(
        "plan",
        epilog="Example: zero-nb plan --model llama-2-70b --world-size 64 --device-memory 80GB",
    )(_plan)
    app.command("tables", epilog="Example: zero-nb tables zero-table1")(_tables)


def _plan(
    model: Annotated[str | None, typer.Option(help="A preset; see zero-nb tables models.")] = None,
    params: Annotated[str | None, typer.Option(help="Parameters alone, such as 7.5e9.")] = None,
    config: Annotated[str | None, typer.Option(help="A Hugging Face config.json.")] = None,
    layers: Annotated[int | None, typer.Option(help="A shape by its numbers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden size of such a shape.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values.")] = None,
    ffn: Annotated[int | None, typer.Option(help="Width of the feed-forward layer.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary.")] = None,
    llama: Annotated[bool, typer.Option(help="RMSNorm, SwiGLU, rotary positions.")] = False,
    tied: Annotated[bool | None, typer.Option(help="Head tied to the embedding.")] = None,
    world_size: Annotated[int, typer.Option(help="All devices.")] = 1,
    device: Annotated[str | None, typer.Option(help=f"One of {_names(DEVICES)}.")] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Such as 80GB (10^9 bytes each) or 80GiB (2^30).")
    ] = None,
    stage: Annotated[str, typer.Option(help="auto, 0, 1, 2 or 3.")] = "auto",
    batch: Annotated[int, typer.Option(help="Micro-batch of one device.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of one step.")] = 1,
    seq: Annotated[int | None, typer.Option(help="Sequence length.")] = None,
    precision: Annotated[
        str | None, typer.Option(help=f"One of {_names(PRECISIONS)}; the framework's otherwise.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"One of {_names(OPTIMIZERS)}.")] = "adamw",
    framework: Annotated[
        str, typer.Option(help=f"Whose buffers are counted: {_names(FRAMEWORKS)}.")
    ] = "zero",
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel degree.")] = 1,
    sp: Annotated[int, typer.Option(help="Sequence-parallel (context, Ulysses) degree.")] = 1,
    recompute: Annotated[str, typer.Option(help=f"One of {_names(RECOMPUTES)}.")] = "none",
    execution: Annotated[
        str | None, typer.Option(help=f"How layers run: {_names(EXECUTIONS)}.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help=f"One of {_names(LOSSES)}.")] = None,
    flash: Annotated[bool, typer.Option(help="Attention without stored scores.")] = True,
    dropout: Annotated[bool, typer.Option(help="Dropout masks are kept.")] = False,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Cut activations outside tensor-parallel regions too.")
    ] = False,
    offload: Annotated[
        list[str] | None, typer.Option(help=f"To the host: {_names(OFFLOADS)}; repeatable.")
    ] = None,
    reduce_bucket: Annotated[int | None, typer.Option(help="Elements reduced together.")] = None,
    overlap: Annotated[bool, typer.Option(help="Two reduce buckets.")] = False,
    max_live: Annotated[int | None, typer.Option(help="Stage 3: gathered parameters.")] = None,
    persist_below: Annotated[
        int, typer.Option(help="Stage 3: tensors below so many elements stay gathered.")
    ] = 0,
    states_only: Annotated[
        bool, typer.Option(help="Parameters, gradients and optimizer states alone, as the paper.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
):
    """Say which ZeRO stage fits a model on a cluster, with every byte named."""
    numbers = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn,
        "vocab": vocab, "seq": seq, "llama": llama, "tied": tied,
    }  # fmt: skip
    by_numbers = any(value is not None for value in (layers, hidden, heads, kv_heads, ffn, vocab))
    if llama:
        numbers.pop("seq")
    answer = plan_command(
        model=model, params=params, config=config, shape=numbers if by_numbers else None,
        world_size=world_size, device=device, device_memory=device_memory, stage=stage,
        batch=batch, micro_batches=micro_batches, seq=seq, states_only=states_only,
        precision=precision, optimizer=optimizer, framework=framework, tp=tp, pp=pp, sp=sp,
        recompute=recompute, execution=execution, loss=loss, flash=flash, dropout=dropout,
        sequence_parallel=sequence_parallel, offload=offload, reduce_bucket=reduce_bucket,
        overlap=overlap, max_live=max_live, persist_below=persist_below,
    )  # fmt: skip
    if as_json:
        _print_json(answer.to_json())
    else:
        _print_plan(answer)


def _tables(
    name: Annotated[str, typer.Argument(help=f"One of {_names(TABLES)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
):
    """Print a published table recomputed beside the printed values."""
    table = tables_command(name)
    if as_json:
        _print_json(table.to_json())
    else:
        _print_table(table)


def _print_json(value) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")
