"""Imported once by the server that workers are forked from; see processes.py. It imports what a run needs."""

import importlib

from dampen.studies.processes import end_with_parent

with end_with_parent():
    for name in ("lightning.fabric.strategies", "torchmetrics.classification", "sklearn.datasets", "dampen.public"):
        importlib.import_module(name)
    for name in ("data", "metrics", "trainer.train"):
        importlib.import_module(f"dampen.studies.{name}")
