"""Depth counts layers in the order in which they run: `linear(0.3, 0.0)` falls from the first to the last of them.

Models are built without memory (torch's meta device), so that large ones can be asked too."""

import copy
import pickle

import pytest
import timm
import torch
import transformers as tr
from torch import nn

import dampen
from dampen import DropHead, DropKey, PatchDropout, linear
from dampen.hooks.discover.depth import towers_of
from dampen.hooks.discover.sites import find_attentions
from tests.families import NanoBlock

TIMM = {
    "mobilenetv4_hybrid_medium": 224, "mobilenetv5_300m_enc": 256, "fastvit_sa12": 256, "fastvit_ma36": 256,
    "nextvit_small": 224, "efficientformerv2_s0": 224, "coatnet_0_rw_224": 224, "maxvit_tiny_rw_224": 224,
    "mobilevit_s": 256, "nest_tiny": 224, "hiera_tiny_224": 224, "tiny_vit_5m_224": 224, "levit_128s": 224,
    "iformer_s": 224, "efficientvit_m0": 224, "twins_svt_small": 224, "crossvit_9_240": 240, "vitamin_small_224": 224,
}  # fmt: skip


def in_order(model, inputs, attentions):
    """The attentions in the order in which they first run."""
    ran = []
    hooks = [
        m.register_forward_pre_hook(lambda m, _, n=n: ran.append(n)) for n, m in attentions.items()
    ]
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
    assert rates == pytest.approx([0.3 * (1 - i / last) for i in range(last + 1)]), [
        x.site.name for x in order
    ]
    assert all(len(layer.attentions) <= 2 for layer in order), "a stage is no layer"


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    check(model, {"x": torch.empty(1, 3, TIMM[name], TIMM[name], device="meta")})


# --- orders that modules do not tell


class Path(nn.Module):
    """Stages made in one order and run in another."""

    def __init__(self, run, **stages):
        super().__init__()
        self.run = run
        for name, depth in stages.items():
            blocks = [NanoBlock() for _ in range(depth or 1)]
            self.add_module(name, nn.ModuleList(blocks) if depth else blocks[0])

    def forward(self, x):
        for block in self.run(self):
            x = block(x)
        return x


X = torch.randn(2, 5, 16)
UNET = {"down_blocks": 2, "up_blocks": 2, "mid_block": 0}
PATHS = {
    "unet": (lambda m: [*m.down_blocks, m.mid_block, *m.up_blocks], UNET),
    "backwards": (lambda m: reversed(m.blocks), {"blocks": 4}),
    "shared": (lambda m: [*reversed(m.blocks), *m.blocks], {"blocks": 3}),
    "as listed": (lambda m: m.blocks, {"blocks": 3}),
}


def depths(reg):
    return {layer.site.name: pytest.approx(layer.clones[0].rate.item()) for layer in reg.layers}


def expected(model):
    ran = []
    blocks = [(n, m) for n, m in model.named_modules() if isinstance(m, NanoBlock)]
    hooks = [m.register_forward_pre_hook(lambda m, _, n=n: ran.append(n)) for n, m in blocks]
    model(X)
    for hook in hooks:
        hook.remove()
    order = list(dict.fromkeys(ran))
    return {n: i / (len(order) - 1) * 0.3 for i, n in enumerate(order)}


@pytest.mark.parametrize("how", ["example", "forward", "eval forward"])
@pytest.mark.parametrize("name", PATHS)
def test_depth_is_the_order_in_which_layers_run(name, how):
    run, stages = PATHS[name]
    model = Path(run, **stages).train()
    wanted = expected(model)
    reg = dampen.regularize(
        model, DropHead(linear(0.0, 0.3)), example=X if how == "example" else None
    )
    if how != "example":
        model.train(how == "forward")(X)
        reg.progress(0.0)
    assert depths(reg) == wanted
    assert list(depths(reg)) == list(wanted)
    model.train()(X)
    model(X)
    assert depths(reg) == wanted


def test_the_second_forward_uses_what_the_first_has_shown():
    model = Path(*PATHS["backwards"][:1], blocks=3).train()
    reg = dampen.regularize(model, DropHead(linear(0.0, 0.3)))
    model(X)
    model(X)
    assert [
        c.rate.item() for layer in model.blocks for c in layer.mixer.dampen_regularizers
    ] == pytest.approx([0.3, 0.15, 0.0])
    assert [layer.site.name for layer in copy.deepcopy(reg)._model_site.order.layers] == [
        "blocks.2",
        "blocks.1",
        "blocks.0",
    ]


def test_layers_that_a_forward_leaves_out_keep_their_places():
    skipped = {1}
    model = Path(
        lambda m: [b for i, b in enumerate(m.blocks) if i not in skipped], blocks=4
    ).train()
    reg = dampen.regularize(model, DropHead(linear(0.0, 0.3)))
    for left_out in ({1}, {0, 3}, set()):
        skipped.clear()
        skipped.update(left_out)
        model(X)
        reg.progress(0.0)
        assert depths(reg) == {f"blocks.{i}": 0.1 * i for i in range(4)}


def test_lists_and_rates_of_one_layer_follow_the_order():
    model = Path(PATHS["backwards"][0], blocks=3).train()
    reg = dampen.regularize(model, DropHead([0.1, 0.2, 0.3]), example=X)
    assert depths(reg) == {"blocks.2": 0.1, "blocks.1": 0.2, "blocks.0": 0.3}


def test_a_method_on_the_first_tokens_is_refused_where_another_layer_runs_first():
    model = Path(PATHS["backwards"][0], blocks=3).train()
    with pytest.raises(RuntimeError, match="'blocks.2' runs before it"):
        dampen.regularize(model, PatchDropout(0.2), example=X)


def test_copies_and_pickles_know_the_order():
    model = Path(_backwards, blocks=3).train()
    reg = dampen.regularize(model, DropHead(linear(0.0, 0.3)), example=X)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(X)
        copied(X)
        rates = [c.rate.item() for layer in copied.blocks for c in layer.mixer.dampen_regularizers]
        assert rates == pytest.approx([0.3, 0.15, 0.0])
    assert depths(reg)["blocks.2"] == 0.0


def test_a_copy_made_while_the_order_is_watched():
    model = Path(_backwards, blocks=3).train()
    dampen.regularize(model, DropHead(linear(0.0, 0.3)))
    for copied in (
        copy.deepcopy(model),
        copy.deepcopy(model.blocks),
        pickle.loads(pickle.dumps(model)),
    ):
        layers = copied.blocks if isinstance(copied, Path) else copied
        assert [
            c.rate.item() for layer in layers for c in layer.mixer.dampen_regularizers
        ] == pytest.approx([0, 0.15, 0.3])
    assert copy.deepcopy(model.blocks[0])._dampen_block.layer.order is None
    copied = copy.deepcopy(model)
    copied(X)
    copied(X)
    assert copied.blocks[0].mixer.dampen_regularizers[0].rate.item() == pytest.approx(0.3)
    assert model.blocks[0].mixer.dampen_regularizers[0].rate.item() == 0


def _backwards(model):
    return reversed(model.blocks)


TOWERS = {
    "open_clip": (["visual.transformer.resblocks.0", "transformer.resblocks.0"], ["visual", ""]),
    "coca": (
        [
            "visual.transformer.resblocks.0",
            "visual.attn_pool",
            "text.transformer.resblocks.0",
            "text_decoder.resblocks.0",
        ],
        ["visual", "visual", "text", "text"],
    ),
    "siglip": (
        ["vision_model.encoder.layers.0", "vision_model.head", "text_model.encoder.layers.0"],
        ["vision_model", "vision_model", "text_model"],
    ),
    "vlm": (
        ["model.vision_tower.encoder.layers.0", "model.language_model.layers.0"],
        ["model.vision_tower", "model.language_model"],
    ),
    "speech": (
        ["text_encoder.layers.0", "text_decoder.layers.0"],
        ["text_encoder", "text_decoder"],
    ),
    "t5": (["encoder.block.0", "decoder.block.0"], ["encoder", "decoder"]),
    "unet": (
        ["down_blocks.0.attentions.0", "mid_block.attentions.0", "up_blocks.0.attentions.0"],
        ["", "", ""],
    ),
    "nest": (["levels.0.transformer_encoder.0", "levels.1.transformer_encoder.0"], ["", ""]),
    "lumina": (["noise_refiner.0", "context_refiner.0", "layers.0"], ["", "", ""]),
}


@pytest.mark.parametrize("name", TOWERS)
def test_each_tower_has_its_own_depth(name):
    names, towers = TOWERS[name]
    assert towers_of(names) == towers


def test_a_pooling_head_is_the_last_layer_of_its_tower():
    size = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = tr.SiglipConfig(
        text_config={**size, "num_hidden_layers": 2, "vocab_size": 50, "projection_size": 32},
        vision_config={**size, "num_hidden_layers": 3, "image_size": 32, "patch_size": 16},
    )
    reg = dampen.regularize(tr.SiglipModel(config), DropHead(linear(0.0, 0.3)))
    assert [
        layer.clones[0].rate.item() for layer in reg.layers if "vision" in layer.site.name
    ] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [
        layer.clones[0].rate.item() for layer in reg.layers if "text" in layer.site.name
    ] == pytest.approx([0.0, 0.3])
