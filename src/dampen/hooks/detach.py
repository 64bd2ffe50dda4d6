"""`remove`: take regularizers off a model, whether its handle is still there or not."""

from __future__ import annotations

from torch import nn

from dampen.hooks.context import ModelSite
from dampen.hooks.swap import is_covered, is_swapped, unswap


def remove(model: nn.Module) -> None:
    """Take every regularizer off `model`, which is then exactly what it was: for a deepcopy or a loaded file, whose
    handle is gone. Where the handle is at hand, `reg.remove()` does the same.

    >>> import copy, dampen
    >>> model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    >>> reg = dampen.regularize(model, dampen.DropKey(0.1))
    >>> twin = copy.deepcopy(model)
    >>> remove(twin)
    >>> type(twin) is dampen.models.ViT, type(model) is dampen.models.ViT
    (True, False)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"remove takes an nn.Module, got {type(model).__name__}.")
    swapped = {name: module for name, module in model.named_modules() if is_swapped(module)}
    if not swapped:
        raise ValueError(
            f"{type(model).__name__} carries no regularizers: it was never regularized, or they were removed already."
        )
    covered = [
        name or "(the model itself)" for name, module in swapped.items() if is_covered(module)
    ]
    if covered:
        more = f" and {len(covered) - 1} more" if len(covered) > 1 else ""
        raise RuntimeError(
            f"remove() after fully_shard (FSDP2) would strip FSDP's class from {covered[0]}{more}. "
            "Nothing was changed. Remove before sharding, or save the state_dict, whose keys are the plain model's, "
            "and load it into a plain model."
        )
    for module in swapped.values():
        site = vars(module).get("_dampen_model")
        if isinstance(site, ModelSite) and not (site.enabled and not site.sampling):
            raise RuntimeError(
                f"remove() inside {'reg.mc_mode()' if site.enabled else 'reg.disable()'}, which would have nothing "
                "left to restore at its end. Nothing was changed. Leave the with block first, then remove."
            )
    for module in list(model.modules()):
        site = vars(module).get("_dampen_model")
        if isinstance(site, ModelSite):
            site.ledger.unwatch()
            for attached in site.attached:
                attached.remove()
            site.attached = []
            for rate in site.own_rates:
                rate.restore()
        unswap(module)
        if "dampen_regularizers" in dict(module.named_children()):
            del module.dampen_regularizers
