"""Depth counts layers in the order in which they run: `linear(0.3, 0.0)` falls from the first to the last of them.

Models are built without memory (torch's meta device), so that large ones can be asked too."""

import pytest
import timm
import torch
import transformers as tr
from torch import nn

import dampen
from dampen import DropKey, linear
from dampen.sockets.find import find_attentions, is_keyless

TIMM = {
    "mobilenetv4_hybrid_medium": 224, "mobilenetv5_300m_enc": 256, "fastvit_sa12": 256, "fastvit_ma36": 256,
    "nextvit_small": 224, "efficientformerv2_s0": 224, "efficientformer_l1": 224, "coatnet_0_rw_224": 224,
    "maxvit_tiny_rw_224": 224, "mobilevit_s": 256, "mobilevitv2_050": None, "nest_tiny": 224, "hiera_tiny_224": 224,
    "tiny_vit_5m_224": 224, "levit_128s": 224, "iformer_s": 224, "lowformer_b0": 224, "efficientvit_m0": 224,
    "swin_tiny_patch4_window7_224": 224, "swinv2_tiny_window8_256": 256, "twins_svt_small": 224, "cait_xxs24_224": 224,
    "crossvit_9_240": 240, "pvt_v2_b0": 224, "mvitv2_tiny": 224, "gcvit_xxtiny": 224, "davit_tiny": 224,
    "caformer_s18": 224, "vitamin_small_224": 224, "visformer_tiny": 224, "pit_ti_224": 224, "shvit_s1": 224,
    "sam2_hiera_tiny": 896, "vit_tiny_patch16_224": 224, "volo_d1_224": 224, "xcit_nano_12_p16_224": 224,
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
    attentions = {n: m for n, m in find_attentions(model).items() if not is_keyless(m)}
    if not attentions:
        pytest.skip("no softmax over tokens here")
    ran = in_order(model, inputs, attentions)
    reg = dampen.regularize(model, DropKey(linear(0.3, 0.0)), depth="model")
    layers = [layer for layer in reg.layers if layer.clones]
    of = {name: i for i, layer in enumerate(layers) for name in layer.attentions}
    order = list(dict.fromkeys(of[name] for name in ran))
    assert order == sorted(order), [layers[i].site.name for i in order]
    rates = [layer.clones[0].rate.item() for layer in layers]
    assert len(layers) > 1
    steps = [layer.site.index / (layer.site.total - 1) for layer in layers]
    assert rates == pytest.approx([0.3 * (1 - s) for s in steps])
    assert all(a > b for a, b in zip(rates, rates[1:], strict=False))
    return layers


@pytest.mark.parametrize("name", [n for n, size in TIMM.items() if size])
def test_timm(name):
    size = TIMM[name]
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    layers = check(model, {"x": torch.empty(1, 3, size, size, device="meta")})
    if name not in ("davit_tiny", "volo_d1_224", "xcit_nano_12_p16_224"):  # these have layers without such a softmax
        assert layers[0].clones[0].rate.item() == pytest.approx(0.3)
        assert layers[-1].clones[0].rate.item() == pytest.approx(0.0)
        assert all(len(layer.attentions) <= 2 for layer in layers), "a stage is no layer"
