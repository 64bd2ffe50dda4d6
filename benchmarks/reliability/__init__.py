"""How hard dampen is to break, counted: `python -m benchmarks.reliability` (minutes; `--full` takes hours).

Each attack is repeated at random points, with a fixed seed, and everything that came out is compared with an
undisturbed run: lost trials, wrong results, tracebacks, hangs. The record is benchmarks/records/reliability.json, and
`--page` writes docs/reliability.md from it. One file per kind of attack; `__main__` has the list with their numbers.
"""
