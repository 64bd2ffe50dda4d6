"""What a class-swapped module does in its forward, by the kind of its site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dampen.sockets.attention import attention_forward, mark_forward
from dampen.sockets.block import block_forward
from dampen.sockets.carrier import carrier_forward
from dampen.sockets.embeddings import embedding_forward, mask_forward
from dampen.sockets.entry import entry_forward
from dampen.sockets.experts import eager_experts_forward, experts_forward
from dampen.sockets.instance import instance_forward
from dampen.sockets.library_backend import backend_forward, hidden_forward
from dampen.sockets.linear import linear_forward
from dampen.sockets.own_dropout import sampled_forward
from dampen.sockets.owner import owner_forward, part_forward
from dampen.sockets.whole_model import model_forward
from dampen.two_pass.reuse import prefix_forward

FORWARDS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "attention": attention_forward,
    "mark": mark_forward,
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
