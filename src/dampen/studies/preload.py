"""Imported once by the server that workers are forked from; see processes.py. It
imports what a run needs."""

import importlib

from dampen.studies.processes import end_with_parent


def warm() -> None:
    """Do once what every worker would do again: each run has a worker of its own.

    Nothing here uses torch's thread pool, which does not survive a fork, nor a GPU.
    """
    import torch  # not above: until the block below begins, nothing watches the parent

    from dampen.extensions import GROUPS, entry_points
    from dampen.studies.data.images import embedded_digits
    from dampen.studies.environment import commit, versions
    from dampen.studies.run import TrainOptions
    from dampen.studies.trainer.distributed import make_fabric

    for name in ("dampen.native.ops", "dampen.registry", "safetensors.torch"):
        importlib.import_module(name)
    for group in GROUPS:
        entry_points(group)
    embedded_digits()
    versions()
    commit()
    if torch.version.cuda is None and torch.version.hip is None:
        make_fabric(TrainOptions(), "auto")


with end_with_parent():
    importlib.import_module("dampen._torch").declare_torchvision_operators()
    for name in (
        "lightning.fabric.strategies",
        "torchmetrics.classification",
        "sklearn.datasets",
        "dampen.public",
    ):
        importlib.import_module(name)
    for name in ("data", "metrics", "trainer.train"):
        importlib.import_module(f"dampen.studies.{name}")
    warm()
