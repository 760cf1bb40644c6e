"""Arrays in one process: storage formats, layouts and the Numba kernels. No rank talks here."""
