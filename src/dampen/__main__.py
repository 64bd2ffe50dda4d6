"""`python -m dampen` is the `dampen` command."""

from dampen.cli import main

if __name__ == "__main__":
    main()
