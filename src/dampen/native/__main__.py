"""`python -m dampen.native`: build the kernels unless they are there, and say in one line what runs. Never fails."""

from dampen.native.library import BuildError, build, status

try:
    build()
    print(status())
except BuildError as error:
    print(f"native kernels were not built, everything runs on torch alone: {error}")
