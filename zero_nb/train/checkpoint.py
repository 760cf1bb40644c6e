"""Checkpoints: a run's state in files, written atomically, read at any stage and world size.

Shape suffixes: R ranks hosted here, W world_size.

[Note: a checkpoint on disk]
The directory that `save` is given looks like this::

    DIR/latest                                     which checkpoint counts
    DIR/step-00000120/checkpoint.json              everything but the tensors, and the sums of
    DIR/step-00000120/rank-00000-of-00004.safetensors       ... all other files
    DIR/step-00000120/rank-00001-of-00004.safetensors

A rank file (layout ``"sharded"``) holds the pieces one rank owns, see [Note: pieces], as
``weight/NAME``, ``optim/exp_avg/NAME`` and so on, 1-D. Layout ``"consolidated"`` has whole tensors
instead: ``model.safetensors`` with the weights under their bare names, tied ones under each, as
PyTorch's ``load_state_dict`` takes them, and ``optimizer.safetensors`` with the moments.

[Note: a kill at any moment]
Files are written to ``.saving-...`` beside the target and synced, then the folder is renamed,
then ``latest`` is replaced by one rename; the former checkpoint is removed only after that. So
whoever dies, at any moment, leaves a ``latest`` that names a complete checkpoint. What a dead
process left lying about is removed by the next save.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from zero_nb.config import UsageError, check_at_least_one
from zero_nb.core.precision import FLOAT32, get_format
from zero_nb.train import snapshot
from zero_nb.train.snapshot import WEIGHT

__all__ = [
    "FORMAT_VERSION",
    "LAYOUTS",
    "CheckpointError",
    "CheckpointInfo",
    "load",
    "prepare",
    "read_info",
    "read_weights",
    "save",
]

FORMAT_VERSION = 1
LAYOUTS = ("sharded", "consolidated")
"""One file a rank, or whole tensors in one place."""

_FORMAT = "zero_nb checkpoint"
_RECORD, _POINTER = "checkpoint.json", "latest"
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_SAVING, _PRUNED = ".saving-", ".pruned-"
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_NO_SUM = "0" * 64  # stands where checkpoint.json's own sum goes, while it is taken
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_log = logging.getLogger("zero_nb")


class CheckpointError(UsageError):
    """A checkpoint that cannot be written or read; its text names the file and what is wrong."""


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is, without its tensors.

    Attributes
    ----------
    path : Path
        The checkpoint's own folder.
    layout : str
        One of `LAYOUTS`.
    stage, world_size : int
    precision : str
        Where it was saved.
    steps_done, skipped_steps : int
    nbytes : int
        Of all files but checkpoint.json.
    extra : dict
        What `save` was given.
    """

    path: Path
    layout: str
    stage: int
    world_size: int
    precision: str
    steps_done: int
    skipped_steps: int
    nbytes: int
    extra: dict = field(default_factory=dict)

    @classmethod
    def _of(cls, folder, record):
        """Read it from checkpoint.json."""
        state = record["state"]
        return cls(
            path=folder,
            layout=record["layout"],
            stage=state["stage"],
            world_size=state["world_size"],
            precision=state["precision"],
            steps_done=state["steps_done"],
            skipped_steps=state["skipped_steps"],
            nbytes=sum(entry["bytes"] for entry in record["files"].values()),
            extra=record["extra"],
        )


# --- saving ------------------------------------------------------------------------------------


def save(optimizer, directory, *, layout="sharded", extra=None, keep=1):
    """Save a run's state; the checkpoint saved before counts until this one is complete.

    Parameters
    ----------
    optimizer : ZeROOptimizer
        Between steps: no gradients held.
    directory : path-like
        Made if missing. One run's own; under MPI one that all processes share.
    layout : {"sharded", "consolidated"}
        One file a rank with what it owns, without any communication; or whole tensors, gathered
        one unit after the other and written by rank 0's process, for PyTorch and others.
    extra : dict, optional
        Anything JSON can hold: the data set's next step, seeds.
    keep : int, default 1
        Complete checkpoints to keep in `directory`, this one among them; older ones are removed.

    Returns
    -------
    CheckpointInfo

    Raises
    ------
    UsageError
        If the layout is unknown, `extra` no JSON, or gradients are held; nothing is written then.
    CheckpointError
        If the files cannot be written. What was saved before is whole.
    """
    world, directory = optimizer.world, Path(directory)
    text = snapshot.together(world, "saving", lambda: _check_save(optimizer, layout, extra, keep))
    leads = 0 in world.ranks
    folder = _agree_on_folder(world, directory, optimizer.steps_done, leads)
    scratch = directory / f"{_SAVING}{folder}"
    try:
        write = _write_consolidated if layout == "consolidated" else _write_sharded
        files = write(optimizer, scratch)
        record = {
            "layout": layout,
            "extra": json.loads(text),
            "files": files,
            "state": snapshot.describe(optimizer),
        }

        def publish():
            if leads:
                _publish(scratch, directory / folder, record)
                _prune(directory, folder, keep)

        _writing(world, directory, publish)
    except Exception:
        if leads:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    return CheckpointInfo._of(directory / folder, record)


def prepare(world, directory):
    """Make a directory to save to and see that it can be written to, before hours of training.

    Parameters
    ----------
    world : World
    directory : path-like

    Raises
    ------
    CheckpointError
        If it cannot.
    """
    directory = Path(directory)

    def probe():
        if 0 in world.ranks:
            _make_folder(directory)
            path = directory / f"{_SAVING}nothing"
            path.mkdir(exist_ok=True)
            path.rmdir()

    _writing(world, directory, probe)


def _check_save(optimizer, layout, extra, keep):
    """Check everything that can be checked before a file is touched; return `extra` as JSON."""
    if layout not in LAYOUTS:
        raise UsageError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    check_at_least_one("keep", keep, "checkpoint")
    snapshot.check_at_rest(optimizer)
    if extra is not None and not isinstance(extra, dict):
        raise UsageError(f"extra must be a dict, got {type(extra).__name__}")
    _to_json("the rule's options or another part of the state", snapshot.describe(optimizer))
    return _to_json("extra", extra or {})


def _to_json(what, value):
    """Return a value as JSON, or say that it is none."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be saved as JSON: {error}") from None


def _writing(world, directory, work):
    """Do a part of saving in all processes, with errors that say where and that say it once."""

    def work_or_say():
        try:
            return work()
        except (OSError, SafetensorError) as error:
            where = getattr(error, "filename", None) or directory
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot save to {where}: {why}; what was saved before is whole"
            ) from error

    return snapshot.together(world, "saving", work_or_say)


def _make_folder(directory):
    """Make a directory and its parents, where there are none, and see them on the disk."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in made:
        _sync_folder(path.parent)


def _agree_on_folder(world, directory, step, leads):
    """Clear away what a dead process left, make the folder to write in, and tell all its name."""

    def prepare():
        if not leads:
            return 0
        _make_folder(directory)
        for path in directory.iterdir():
            if path.name.startswith((_SAVING, _PRUNED)):
                shutil.rmtree(path)
        again = 0
        while (directory / _folder_name(step, again)).exists():
            again += 1
        (directory / f"{_SAVING}{_folder_name(step, again)}").mkdir()
        return again

    again = _writing(world, directory, prepare)
    again_R1 = np.full((world.hosted, 1), again, np.int64)
    again = int(world.all_gather_scalars(again_R1, purpose="other", label="folder")[0, 0])
    return _folder_name(step, again)


def _folder_name(step, again):
    """Name a checkpoint; the second one of a step needs another name."""
    return f"step-{step:08d}" + (f"-{again + 1}" if again else "")


def _write_sharded(optimizer, scratch):
    """Write the hosted ranks' files; return what checkpoint.json says of all ranks' files."""
    world = optimizer.world

    def write():
        return [
            _write_tensors(
                scratch / _rank_file(rank, world.size),
                {
                    f"{kind}/{name}": (values, fmt)
                    for kind, name, values, fmt in snapshot.owned_pieces(optimizer, row)
                },
            )
            for row, rank in enumerate(world.ranks)
        ]

    sums = _tell_all(world, [[one] for one in _writing(world, scratch.parent, write)])
    kinds = list(snapshot.kinds_of(snapshot.describe(optimizer)))
    return {
        _rank_file(rank, world.size): _entry(
            *sums[rank][0],
            kinds,
            {part.name: [part.offset, part.stop] for part in snapshot.owned_parts(optimizer, rank)},
        )
        for rank in range(world.size)
    }


def _tell_all(world, written):
    """Make known to all what was written: for each hosted rank a list of (size, SHA-256)."""
    # Five int64 each: nobody has to read another's files.
    rows = [
        [number for size, digest in row for number in (size, *np.frombuffer(digest, "<i8"))]
        for row in written
    ]
    sums_W = world.all_gather_scalars(np.array(rows, np.int64), purpose="other", label="sums")
    return [
        [(int(part[0]), part[1:].astype("<i8").tobytes()) for part in row.reshape(-1, 5)]
        for row in sums_W
    ]


def _rank_file(rank, world_size):
    """Name the file of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _write_consolidated(optimizer, scratch):
    """Gather whole tensors and let rank 0's process write them; return what is said of them."""
    world, leads = optimizer.world, 0 in optimizer.world.ranks
    tensors = {_MODEL: {}, _OPTIMIZER: {}}
    for kind, name, tensor, fmt in snapshot.whole_tensors(optimizer):
        if not leads:
            continue
        if kind == WEIGHT:
            tied = [alias for alias, first in optimizer.aliases.items() if first == name]
            tensors[_MODEL] |= dict.fromkeys((name, *tied), (tensor, fmt))
        else:
            tensors[_OPTIMIZER][f"{kind}/{name}"] = (tensor, fmt)
    described = snapshot.describe(optimizer)
    kinds = snapshot.kinds_of(described)
    numels = {n: math.prod(p["shape"]) for n, p in described["parameters"].items()}
    trained = {n for n, p in described["parameters"].items() if p["trainable"]}
    holds = {_MODEL: (kinds[:1], numels)}
    if kinds[1:]:
        holds[_OPTIMIZER] = (kinds[1:], trained)

    def write():
        if not leads:
            return [(0, bytes(32))] * len(holds)
        return [_write_tensors(scratch / file, tensors[file], {"format": "pt"}) for file in holds]

    written = _writing(world, scratch.parent, write)
    sums = _tell_all(world, [written] * world.hosted)[0]
    return {
        file: _entry(
            *one,
            list(of_kinds),
            {name: [0, numels[name]] for name in numels if name in names},
        )
        for one, (file, (of_kinds, names)) in zip(sums, holds.items(), strict=True)
    }


def _entry(size, digest, kinds, pieces):
    """Return what checkpoint.json says of one file of tensors."""
    return {"bytes": size, "sha256": digest.hex(), "kinds": kinds, "pieces": pieces}


def _write_tensors(path, tensors, metadata=None):
    """Write one safetensors file, name -> (array, format); return its size and SHA-256."""
    specs = {
        name: TensorSpec(
            dtype=fmt.name, shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes
        )
        for name, (values, fmt) in tensors.items()
    }
    content = serialize(specs, metadata)
    _write_file(path, content)
    return len(content), hashlib.sha256(content).digest()


def _write_file(path, content):
    """Write a new file and see it safely on the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path):
    """See the names in a folder safely on the disk; Windows has no such call, and no need."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(scratch, folder, record):
    """Complete a checkpoint and let it count: see [Note: a kill at any moment]."""
    for file, entry in record["files"].items():
        path = scratch / file
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"rank 0's process does not see {path} as another process wrote it; save to a "
                "directory that all processes share"
            )
    head = {"format": _FORMAT, "version": FORMAT_VERSION, "sha256": _NO_SUM}
    text = json.dumps(head | record, indent=1, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    pointer = json.dumps({"checkpoint": folder.name, "sha256": digest})
    _write_file(scratch / _RECORD, text.replace(_NO_SUM, digest, 1).encode())
    _write_file(scratch / _POINTER, pointer.encode())
    _sync_folder(scratch)
    # From here on nothing needs room on the disk: two renames.
    os.rename(scratch, folder)
    try:
        _sync_folder(folder.parent)
        os.replace(folder / _POINTER, folder.parent / _POINTER)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync_folder(folder.parent)


def _prune(directory, current, keep):
    """Remove older checkpoints; one that resists is a warning, as the new one counts already."""
    others = [
        (int(match[1]), int(match[2] or 1), path)
        for path in directory.iterdir()
        if (match := _FOLDER.fullmatch(path.name)) and path.name != current
    ]
    for *_, path in sorted(others, reverse=True)[keep - 1 :]:
        pruned = path.with_name(f"{_PRUNED}{path.name}")
        try:
            os.rename(path, pruned)  # so that nothing half removed bears a checkpoint's name
            shutil.rmtree(pruned)
        except OSError as error:
            _log.warning("could not remove the old checkpoint %s: %s", path, error)


# --- loading -----------------------------------------------------------------------------------


def load(optimizer, directory):
    """Make a saved state an optimizer's, at whatever stage, world size, units and precision.

    Parameters
    ----------
    optimizer : ZeROOptimizer
        Made like the one that was saved: the same parameters, ties, frozen ones and rule. The
        options of its groups, step counts, learning rate and loss scale become the saved ones.
        Gradients it holds are dropped.
    directory : path-like
        What `save` was given, for the latest checkpoint in it; or one checkpoint's folder.

    Returns
    -------
    CheckpointInfo
        With what `save` was given as `extra`.

    Raises
    ------
    CheckpointError
        If a file is missing, truncated, changed or swapped, of another version, or does not fit
        this optimizer; in all processes if in one. Nothing is changed then.

    Notes
    -----
    Each process reads the files that hold something its ranks own, and checks its share of all
    others.
    """
    world = optimizer.world
    found, incoming = snapshot.together(world, "loading", lambda: _read(optimizer, directory))
    folder, record = found
    digest_4 = np.frombuffer(bytes.fromhex(record["sha256"]), "<i8").astype(np.int64)
    digests_W4 = world.all_gather_scalars(
        np.tile(digest_4, (world.hosted, 1)), purpose="other", label="same checkpoint"
    )
    if (digests_W4 != digest_4).any():
        raise CheckpointError(
            f"{folder}: processes found different checkpoints; load from a directory that all "
            "processes share, while nobody saves to it"
        )
    incoming.commit()
    return CheckpointInfo._of(folder, record)


def read_info(directory):
    """Return what a checkpoint is, reading its checkpoint.json only.

    Parameters
    ----------
    directory : path-like
        See `load`.

    Returns
    -------
    CheckpointInfo

    Raises
    ------
    CheckpointError
        If there is none, or its checkpoint.json was changed.
    """
    return CheckpointInfo._of(*_find(Path(directory)))


def read_weights(directory):
    """Return a checkpoint's weights in full, to start another run from.

    Parameters
    ----------
    directory : path-like
        See `load`.

    Returns
    -------
    dict of str to ndarray, float32
        Every parameter in its shape, in parameter order; tied names share one array, as
        `ZeROOptimizer` takes them.

    Raises
    ------
    CheckpointError
        If a file is missing or was changed.
    """
    folder, record = _find(Path(directory))
    saved = record["state"]["parameters"]
    flat = {name: np.empty(math.prod(p["shape"]), np.float32) for name, p in saved.items()}
    for kind, name, start, values, fmt in _pieces(folder, record, lambda *_: True):
        if kind == WEIGHT:
            flat[name][start : start + values.size] = fmt.widen(values)
    weights = {}
    for name, p in saved.items():
        weights |= dict.fromkeys((name, *p["tied"]), flat[name].reshape(p["shape"]))
    return weights


def _read(optimizer, directory):
    """Check a checkpoint and lay out what the hosted ranks own, changing nothing."""
    folder, record = _find(Path(directory))
    try:
        fit = snapshot.check_fits(optimizer, record["state"])
        incoming = snapshot.Incoming(optimizer, fit)
        world, files = optimizer.world, list(record["files"])

        def wanted(file):
            pieces = record["files"][file]["pieces"].items()
            mine = files.index(file) % world.size in world.ranks
            return mine or any(incoming.wants(name, *span) for name, span in pieces)

        for piece in _pieces(folder, record, wanted):
            incoming.put(*piece)
        assert incoming.complete  # `_check_cover` saw no hole
    except CheckpointError:
        raise
    except UsageError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return (folder, record), incoming


def _find(directory):
    """Return the folder of the checkpoint that counts, and its checked checkpoint.json."""
    try:
        if (directory / _RECORD).is_file():
            return directory, _read_record(directory / _RECORD)
        if not (directory / _POINTER).is_file():
            raise CheckpointError(_nothing_in(directory))
        folder, digest = _read_pointer(directory / _POINTER)
        if not folder.is_dir():
            raise CheckpointError(f"{directory / _POINTER} names {folder.name}, which is missing")
        record = _read_record(folder / _RECORD)
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error
    if record["sha256"] != digest:
        raise CheckpointError(
            f"{directory / _POINTER} was written for another {folder / _RECORD} than there is"
        )
    return folder, record


def _read_pointer(path):
    """Return the folder that ``latest`` names, and the sum of the checkpoint.json in it."""
    try:
        named = json.loads(path.read_bytes())
        name, digest = named["checkpoint"], named["sha256"]
        if not _FOLDER.fullmatch(name):
            raise ValueError(f"{name!r} is no checkpoint's name")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} was changed after it was saved: {error}") from None
    return path.parent / name, digest


def _nothing_in(directory):
    """Say what is in a directory without a checkpoint that counts."""
    if not directory.exists():
        return f"there is no directory {directory}; give one that a run was saved to"
    known = sorted(p.parent.name for p in directory.glob(f"step-*/{_RECORD}"))
    hint = f"; its {known[-1]} can be given itself" if known else ""
    return f"{directory} holds no checkpoint: it has no file {_POINTER!r}{hint}"


def _read_record(path):
    """Return a checkpoint.json whose version is known and whose sum is right."""
    content = path.read_bytes()
    changed = CheckpointError(f"{path} was changed after it was saved, or is truncated")
    try:
        record = json.loads(content)
        ours, version = record["format"] == _FORMAT, record["version"]
    except (ValueError, KeyError, TypeError):
        raise changed from None
    if not ours:
        raise CheckpointError(f"{path} describes no checkpoint of zero_nb")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is of version {version!r}, this zero_nb reads version {FORMAT_VERSION}; use "
            "the zero_nb it was saved with"
        )
    digest = record.get("sha256")
    if not isinstance(digest, str) or len(digest) != len(_NO_SUM):
        raise changed
    plain = content.replace(digest.encode(), _NO_SUM.encode(), 1)
    if hashlib.sha256(plain).hexdigest() != digest:
        raise changed
    _check_cover(path, record)
    return record


def _check_cover(path, record):
    """Refuse file names that lead elsewhere, and pieces that leave holes or overlap."""
    kinds = snapshot.kinds_of(record["state"])
    for file in record["files"]:
        if Path(file).name != file:
            raise CheckpointError(f"{path} names a file outside its folder: {file!r}")
    for name, saved in record["state"]["parameters"].items():
        for kind in kinds if saved["trainable"] else kinds[:1]:
            end = 0
            for start, stop in sorted(
                entry["pieces"][name]
                for entry in record["files"].values()
                if kind in entry["kinds"] and name in entry["pieces"]
            ):
                if start != end:
                    break
                end = stop
            if end != math.prod(saved["shape"]):
                raise CheckpointError(
                    f"{path}: {kind} of {name!r} is in no file, or in two, from element {end} on"
                )


def _pieces(folder, record, wanted):
    """Yield the pieces of wanted files, each file checked before its first: see `owned_pieces`.

    Yields
    ------
    kind, name : str
    start : int
    values : ndarray, 1-D
    fmt : Format
    """
    whole = record["layout"] == "consolidated"
    for file, entry in record["files"].items():
        if not wanted(file):
            continue
        expected = {}
        for kind in entry["kinds"]:
            for name, (start, stop) in entry["pieces"].items():
                saved = record["state"]["parameters"][name]
                if kind == WEIGHT or saved["trainable"]:
                    key = name if whole and kind == WEIGHT else f"{kind}/{name}"
                    fmt = get_format(saved["dtype"]) if kind == WEIGHT else FLOAT32
                    shape = saved["shape"] if whole else [stop - start]
                    expected[key] = (kind, name, start, shape, fmt)
        tensors = _read_tensors(folder / file, entry, record["files"])
        for key, (kind, name, start, shape, fmt) in expected.items():
            tensor = tensors.get(key)
            if tensor is None:
                raise CheckpointError(f"{folder / file} has no tensor {key!r}")
            if tensor["dtype"] != _CODES[fmt.name] or list(tensor["shape"]) != shape:
                raise CheckpointError(
                    f"{folder / file}: {key!r} is {tensor['dtype']} {tensor['shape']}, "
                    f"{_CODES[fmt.name]} {shape} was saved"
                )
            yield kind, name, start, np.frombuffer(tensor["data"], fmt.dtype), fmt


def _read_tensors(path, entry, files):
    """Return the tensors of a file whose size and sum are those that were saved."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; it is a part of this checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry["sha256"]:
        for other, saved in files.items():
            if digest == saved["sha256"]:
                raise CheckpointError(f"{path} holds what was saved as {other}; swapped?")
        if len(content) != entry["bytes"]:
            raise CheckpointError(
                f"{path} has {len(content)} bytes, {entry['bytes']} were saved: truncated, or "
                "another file"
            )
        raise CheckpointError(
            f"{path} was changed after it was saved: SHA-256 {digest[:16]}... instead of "
            f"{entry['sha256'][:16]}..."
        )
    try:
        return dict(deserialize(content))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
