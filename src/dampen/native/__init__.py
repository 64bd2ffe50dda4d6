"""Optional native kernels for the CPU: attention that hides keys on the way, inverted dropout, and
sums of penalties.

Built on request (`dampen doctor --build`), kept in the cache folder for this processor and torch,
and used when there; `DAMPEN_NATIVE=0` switches them off. Without them everything runs on torch
alone. `kernels.cpp` and the headers beside it hold the kernels (random numbers, products, rows of
scores, attention, penalties), `library.py` compiles and loads them, `ops.py` makes torch operators
of them, `taps.py` functions for penalties.
"""

from dampen.native.library import available, build, library_path, status

__all__ = ["available", "build", "library_path", "status"]
