"""Optional native kernels for the CPU: attention that hides keys on the way, and inverted dropout.

Built on request (`dampen doctor --build`), kept in the cache folder for this processor and torch, and used when there;
`DAMPEN_NATIVE=0` switches them off. Without them everything runs on torch alone. `kernels.cpp` holds the kernels,
`library.py` compiles and loads them, `ops.py` makes torch operators of them.
"""

from dampen.native.library import available, build, library_path, status

__all__ = ["available", "build", "library_path", "status"]
