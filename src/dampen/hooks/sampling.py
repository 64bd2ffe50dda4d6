"""Monte-Carlo sampling of the dropout that a model brings itself, while the model is in eval mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from dampen.hooks.own_dropout import SampledSite, find_own, no_fast_path
from dampen.hooks.swap import pop, swap


@contextlib.contextmanager
def sampling_own(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of `model` that have a drop rate above 0 drop in eval mode too. Blocks may nest."""
    modules = {id(r.module): r.module for r in find_own(model) if r.rate > 0}.values()
    new = [m for m in modules if "_dampen_sampled" not in vars(m)]
    for module in new:
        swap(module, "sampled", SampledSite())
    sites: list[SampledSite] = [vars(m)["_dampen_sampled"] for m in modules]
    before = [site.on for site in sites]
    for site in sites:
        site.on = True
    try:
        with no_fast_path():
            yield
    finally:
        for site, was in zip(sites, before, strict=True):
            site.on = was
        for module in new:
            pop(module, "sampled")
