"""Depth counts layers in the order in which they run: `linear(0.3, 0.0)` falls from the first to the last of them.

Models are built without memory (torch's meta device), so that large ones can be asked too."""

import pytest
import timm
import torch

import dampen
from dampen import DropKey, linear
from dampen.sockets.find import find_attentions

TIMM = {
    "mobilenetv4_hybrid_medium": 224, "mobilenetv5_300m_enc": 256, "fastvit_sa12": 256, "fastvit_ma36": 256,
    "nextvit_small": 224, "efficientformerv2_s0": 224, "coatnet_0_rw_224": 224, "maxvit_tiny_rw_224": 224,
    "mobilevit_s": 256, "nest_tiny": 224, "hiera_tiny_224": 224, "tiny_vit_5m_224": 224, "levit_128s": 224,
    "iformer_s": 224, "efficientvit_m0": 224, "twins_svt_small": 224, "crossvit_9_240": 240, "vitamin_small_224": 224,
}  # fmt: skip


def in_order(model, inputs, attentions):
    """The attentions in the order in which they first run."""
    ran = []
    hooks = [m.register_forward_pre_hook(lambda m, _, n=n: ran.append(n)) for n, m in attentions.items()]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return list(dict.fromkeys(ran))


def check(model, inputs):
    attentions = find_attentions(model)
    ran = in_order(model, inputs, attentions)
    assert sorted(ran) == sorted(attentions)
    reg = dampen.regularize(model, DropKey(linear(0.3, 0.0)))
    of = {name: layer for layer in reg.layers for name in layer.attentions}
    order = list(dict.fromkeys(of[name] for name in ran))
    rates = [layer.clones[0].rate.item() for layer in order]
    last = len(rates) - 1
    assert last > 0
    assert rates == pytest.approx([0.3 * (1 - i / last) for i in range(last + 1)]), [x.site.name for x in order]
    assert all(len(layer.attentions) <= 2 for layer in order), "a stage is no layer"


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    check(model, {"x": torch.empty(1, 3, TIMM[name], TIMM[name], device="meta")})
