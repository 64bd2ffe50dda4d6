"""What each method costs: training steps against the baseline, in one process
with interleaved rounds.

    dampen bench -o bench.json

A plug-in may add other formulations of a method, which are timed beside ours: see `Formulation`.
"""

from dampen.studies.bench.rows import Variant, find_variants
from dampen.studies.bench.run import NOISY, Options, bench
from dampen.studies.bench.subject import Subject, make_subject, peak_memory

__all__ = [
    "NOISY",
    "Options",
    "Subject",
    "Variant",
    "bench",
    "find_variants",
    "make_subject",
    "peak_memory",
]
