"""Imported once by the server that workers are forked from; see processes.py. It imports what a trial needs."""

import importlib
import sys

for name in ("lightning.fabric.strategies", "torchmetrics.classification", "sklearn.datasets", "dampen.public"):
    importlib.import_module(name)
for name in ("data", "metrics", "trainer.train"):
    importlib.import_module(f"dampen.studies.{name}")
if "_dampen_watch" in sys.modules:
    sys.modules["_dampen_watch"].end()
