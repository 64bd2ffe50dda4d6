"""`python -m dampen.native`: build the kernels unless they are there, and say in one line what
runs. Never fails: they are optional, and without them everything runs on torch."""

from dampen.native.library import BuildError, build, status

WITHOUT = "torch's kernels will be used, which give the same methods at a higher cost."


def main() -> None:
    """One line: the kernels in use, or what happened and what runs instead."""
    try:
        build()
        print(f"{status()}.")
    except BuildError as error:
        print(f"native kernels were not built: {str(error).rstrip('.')}. {WITHOUT}")
    except Exception as error:  # whatever it is, no installation may stop here
        said = " ".join(str(error).split()).encode("ascii", "backslashreplace").decode()
        print(f"native kernels were not built ({type(error).__name__}: {said}). {WITHOUT}")


if __name__ == "__main__":
    main()
