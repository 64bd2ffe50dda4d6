"""A plug-in of `dampen bench`: the papers' own formulations and what timm and torch.nn offer, beside our methods.

DAMPEN_PLUGINS=benchmarks.formulations dampen bench
"""

from dampen.studies import plugins

plugins.register(
    __name__,
    formulations={
        "papers": "benchmarks.published:PAPERS",
        "alternatives": "benchmarks.alternatives:ALTERNATIVES",
    },
)
