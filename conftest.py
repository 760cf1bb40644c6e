"""For all tests and all notebooks under test: leave the learner's own record alone."""

import os
import sys
from importlib.util import find_spec

os.environ["ZERO_NB_SCORE"] = "off"

# Notebook 10 starts real processes. Where there are none it skips itself, so that what it shows is
# not what is kept; a test of its own looks at that. In CI it always runs, as the tests of MPI do.
_NO_PROCESSES = sys.platform == "win32" or (find_spec("mpi4py") is None and "CI" not in os.environ)
collect_ignore = (
    [
        "notebooks/10_real_processes.ipynb",
        "notebooks/learner/10_real_processes.ipynb",
    ]
    if _NO_PROCESSES
    else []
)
