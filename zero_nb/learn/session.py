"""What a learner has done: in this kernel, and in a small file that belongs to the learner.

[Note: the learner's own record]
The file lies beside the notebook, in plain JSON, and holds the key of each exercise with its
status and the number of tries: no name, no answer, no date. It can be read, copied and deleted,
nothing is ever sent anywhere, and nothing depends on it: what a notebook shows comes from this
kernel's run alone, so that an executed notebook is the same on every machine. If the folder
cannot be written to, the record lives as long as the kernel.

``ZERO_NB_SCORE`` names another file, or says ``off`` (as the tests do).
"""

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

__all__ = [
    "GUESSED",
    "NOT_ATTEMPTED",
    "NOT_YET",
    "PASSED",
    "SESSION",
    "Session",
    "read_record",
    "record_path",
]

NOT_ATTEMPTED = "not attempted"
NOT_YET = "not yet"
PASSED = "passed"
GUESSED = "guessed"

_FILE = "my_score.json"
_ORDER = (NOT_ATTEMPTED, GUESSED, NOT_YET, PASSED)


@final
@dataclass
class Session:
    """What happened in this kernel.

    Attributes
    ----------
    status : dict of str to str
        The latest status of each exercise that was checked.
    tries : dict of str to int
        How often an answer was given.
    hints : dict of str to int
        How many hints were asked for.
    """

    status: dict = field(default_factory=dict)
    tries: dict = field(default_factory=dict)
    hints: dict = field(default_factory=dict)

    def note(self, key, status):
        """Remember the outcome of an exercise, here and in the learner's file.

        Parameters
        ----------
        key : str
        status : str
            One of the four words of this module.
        """
        self.status[key] = status
        if status != NOT_ATTEMPTED:
            self.tries[key] = self.tries.get(key, 0) + 1
            _add_to_record(key, status)

    def has_passed(self, key):
        """Whether the exercise has passed when it was checked last, in this kernel (bool)."""
        return self.status.get(key) == PASSED

    def clear(self):
        """Forget everything that happened in this kernel."""
        for memory in (self.status, self.tries, self.hints):
            memory.clear()


SESSION = Session()
"""The session of this kernel."""


def record_path():
    """Return the learner's file (Path), or None if nothing is to be kept."""
    place = os.environ.get("ZERO_NB_SCORE", "")
    if place.lower() == "off":
        return None
    return Path(place) if place else Path.cwd() / _FILE


def read_record():
    """Read the learner's file.

    Returns
    -------
    dict of str to dict
        ``status`` and ``tries`` by exercise; empty if there is no file, or it is damaged.
    """
    path = record_path()
    try:
        exercises = json.loads(path.read_text(encoding="utf-8"))["exercises"]
        return {
            str(key): {"status": entry["status"], "tries": int(entry["tries"])}
            for key, entry in exercises.items()
            if entry["status"] in _ORDER
        }
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return {}


def write_record(record):
    """Write the learner's file in one step; do nothing if that is not possible.

    Parameters
    ----------
    record : dict
        As `read_record` returns it.
    """
    path = record_path()
    if path is None:
        return
    text = json.dumps({"version": 1, "exercises": record}, indent=1, sort_keys=True) + "\n"
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _add_to_record(key, status):
    """Count one more try; what has passed once stays passed."""
    if record_path() is None:
        return
    record = read_record()
    known = record.get(key, {"status": NOT_ATTEMPTED, "tries": 0})
    best = max(known["status"], status, key=_ORDER.index)
    record[key] = {"status": best, "tries": known["tries"] + 1}
    write_record(record)
