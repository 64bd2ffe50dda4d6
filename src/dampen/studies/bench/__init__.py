"""What each method costs: training steps against the best plain step, beside the papers' own formulations and what one
would pick instead, in one process with interleaved rounds.

    dampen bench -o benchmarks/records/bench.json
"""

from dampen.studies.bench.rows import Variant, find_variants
from dampen.studies.bench.run import NOISY, Options, bench
from dampen.studies.bench.subject import Subject, make_subject, peak_memory

__all__ = ["NOISY", "Options", "Subject", "Variant", "bench", "find_variants", "make_subject", "peak_memory"]
