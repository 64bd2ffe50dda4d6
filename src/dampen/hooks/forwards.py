"""What a class-swapped module does in its forward, by the kind of its site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dampen.hooks.attention import attention_forward, mark_forward
from dampen.hooks.block import block_forward, linear_forward
from dampen.hooks.carrier import carrier_forward
from dampen.hooks.embeddings import embedding_forward, mask_forward
from dampen.hooks.entry import entry_forward
from dampen.hooks.experts import eager_experts_forward, experts_forward
from dampen.hooks.instance import instance_forward
from dampen.hooks.library_backend import backend_forward, hidden_forward
from dampen.hooks.own_dropout import sampled_forward
from dampen.hooks.owner import owner_forward, part_forward
from dampen.hooks.subset import subset_forward
from dampen.hooks.whole_model import model_forward
from dampen.two_pass.reuse import prefix_forward

FORWARDS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "attention": attention_forward,
    "mark": mark_forward,
    "subset": subset_forward,
    "linear": linear_forward,
    "block": block_forward,
    "prefix": prefix_forward,
    "embedding": embedding_forward,
    "mask": mask_forward,
    "experts": experts_forward,
    "eager_experts": eager_experts_forward,
    "owner": owner_forward,
    "part": part_forward,
    "model": model_forward,
    "instance": instance_forward,
    "entry": entry_forward,
    "sampled": sampled_forward,
    "carrier": carrier_forward,
    "backend": backend_forward,
    "hidden": hidden_forward,
}
