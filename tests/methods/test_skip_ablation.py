"""SkipAblation against blocks written without the skip, on every family of blocks, before and after the norm."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen.checking import check_regularizer
from dampen.models.block import Block
from reproductions.models.convmixer import ConvMixer
from reproductions.models.decoder import DecoderBlock
from reproductions.models.seq2seq import Seq2Seq

CASES = [(True, False), (False, True), (True, True)]


def add(keep, residual, branch):
    return residual + branch if keep else branch


def own_reference(model, images, attention, ffn):
    x = model.embed(images)
    x = torch.cat([(model.cls_token + model.pos_embed[:, :1]).expand(len(x), -1, -1), x], dim=1)
    for b in model.blocks:
        if b.norm_first:
            x = add(not attention, x, b.attn(b.norm1(x)))
            x = add(not ffn, x, b.mlp(b.norm2(x)))
        else:
            x = b.norm1(add(not attention, x, b.attn(x)))
            x = b.norm2(add(not ffn, x, b.mlp(x)))
    return model.head(model.norm(x)[:, 0])


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("attention", "ffn"), CASES)
def test_own_vit_to_the_bit(attention, ffn, norm_first):
    """Exactly the branch, not residual + (branch - residual): condition numbers see that rounding."""
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=2, width=16, depth=3, heads=2, mlp=24, norm_first=norm_first
    )
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    expected = own_reference(model, x, attention, ffn)
    reg = dampen.regularize(model, dampen.SkipAblation(attention, ffn))
    for training in (True, False):
        assert torch.equal(model.train(training)(x), expected)
    assert not torch.equal(expected, before)
    reg.remove()
    assert torch.equal(model(x), before)


def torch_reference(layer, x, attention, ffn):
    def attend(x):
        return layer.self_attn(x, x, x, need_weights=False)[0]

    def feed(x):
        return layer.linear2(F.relu(layer.linear1(x)))

    if layer.norm_first:
        x = add(not attention, x, attend(layer.norm1(x)))
        return add(not ffn, x, feed(layer.norm2(x)))
    x = layer.norm1(add(not attention, x, attend(x)))
    return layer.norm2(add(not ffn, x, feed(x)))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("attention", "ffn"), CASES)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_torch_encoder(attention, ffn, norm_first, batch_first):
    """Also without gradient in eval, where torch would take a fused path around our additions."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        16, 2, 24, dropout=0.0, norm_first=norm_first, batch_first=batch_first
    )
    model = nn.TransformerEncoder(layer, 2)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    x = torch.randn(3, 5, 16)
    expected = x
    for inner in model.layers:
        expected = torch_reference(inner, expected, attention, ffn)
    dampen.regularize(model, dampen.SkipAblation(attention, ffn))
    torch.testing.assert_close(model(x), expected)
    model.eval()
    torch.testing.assert_close(model(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_torch_encoder_with_padding_in_eval():
    """nn.TransformerEncoder may make nested tensors of padded batches in eval, for layers that cannot take them now."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 2
    )
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    dampen.regularize(model, dampen.SkipAblation(attention=True))
    expected = model(x, src_key_padding_mask=padding)
    model.eval()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="use_nested_tensor = False"):
            model(x, src_key_padding_mask=padding)
        model.use_nested_tensor = False
        got = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], expected[~padding])


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_blocks(norm_first):
    """Self-attention and cross-attention both count as attention."""
    torch.manual_seed(0)
    model = Seq2Seq(20, 20, width=16, depth=1, heads=2, mlp=24, norm_first=norm_first)
    source, target = torch.randint(1, 20, (2, 6)), torch.randint(1, 20, (2, 4))
    d = model.decoder[0]
    assert isinstance(d, DecoderBlock)
    x, memory, keep = (
        torch.randn(2, 4, 16),
        torch.randn(2, 6, 16),
        torch.ones(4, 4, dtype=torch.bool).tril(),
    )
    if norm_first:
        y = d.self_attn(d.norm1(x), keep=keep)
        y = d.cross_attn(d.norm2(y), memory)
        expected = y + d.mlp(d.norm3(y))
    else:
        y = d.norm1(d.self_attn(x, keep=keep))
        y = d.norm2(d.cross_attn(y, memory))
        expected = d.norm3(y + d.mlp(y))
    dampen.regularize(model, dampen.SkipAblation(attention=True))
    assert torch.equal(d(x, memory, keep), expected)
    assert torch.isfinite(model(source, target)).all()


def zero_attention(model, names):
    """Make every attention's output projection give zero: then without the skip nothing of the input is left."""
    for name, parameter in model.named_parameters():
        if any(n in name for n in names):
            nn.init.zeros_(parameter)


def families():
    import timm
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    images = {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids = {"input_ids": torch.randint(1, 19, (2, 7))}
    yield (
        "timm vit",
        timm.create_model(
            "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2
        ),
        {"x": torch.randn(2, 3, 8, 8)},
        ["attn.proj"],
        ["fc2"],
    )
    yield (
        "timm swin",
        timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=8, depths=(2, 2), num_heads=(2, 2)
        ),
        {"x": torch.randn(2, 3, 32, 32)},
        ["attn.proj"],
        ["fc2"],
    )  # fmt: skip
    yield (
        "hf vit",
        ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)),
        images,
        ["o_proj", "attention.output.dense"],
        ["fc2", ".output.dense"],
    )
    yield (
        "hf bert (post-norm)",
        BertModel(
            BertConfig(
                **sizes, vocab_size=19, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
            )
        ),
        ids,
        ["attention.output.dense"],
        [".output.dense"],
    )
    yield (
        "hf llama",
        LlamaModel(LlamaConfig(**sizes, vocab_size=19, use_cache=False)),
        ids,
        ["o_proj"],
        ["down_proj"],
    )


def tokens(model, inputs):
    """What leaves the first block."""
    seen = []
    blocks = [
        m
        for m in model.modules()
        if type(m).__name__.endswith(("Block", "Layer", "LlamaDecoderLayer"))
    ]
    hook = blocks[0].register_forward_hook(
        lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out)
    )
    model(**inputs)
    hook.remove()
    return seen[0].detach()


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("training", [True, False])
def test_library_blocks_lose_their_input(index, training):
    """With a branch of zeros and no skip around it, a block forgets its input; with the skip it does not."""
    torch.manual_seed(0)
    name, plain, inputs, attention, ffn = list(families())[index]
    for kind, projections in (("attention", attention), ("ffn", ffn)):
        model = copy.deepcopy(plain).train(training)
        zero_attention(model, projections)
        other = {k: v.flip(-1) for k, v in inputs.items()}
        assert not torch.allclose(tokens(model, inputs), tokens(model, other)), (name, kind)
        reg = dampen.regularize(model, dampen.SkipAblation(**{kind: True}))
        with torch.set_grad_enabled(training):
            a, b = tokens(model, inputs), tokens(model, other)
        torch.testing.assert_close(a, b, msg=f"{name}: {kind}")
        spread = (a - a.flatten(0, -2)[0]).abs().max()  # every token alike
        assert spread < 1e-5, (name, kind)
        reg.remove()


class Parallel(nn.Module):
    """attention and feed-forward side by side: one addition for two branches, with one skip around both."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = (
            nn.LayerNorm(16),
            Block(16, 2, 24).attn,
            Block(16, 2, 24).mlp,
        )

    def forward(self, x):
        h = self.norm(x)
        return x + (self.attn(h) + self.mlp(h))


class Gated(Parallel):
    """A mixture of stream and branch that is no addition."""

    def forward(self, x):
        x = torch.lerp(x, self.attn(self.norm(x)), 0.5)
        return x + self.mlp(x)


def test_any_other_block_raises():
    for block in (Gated(), Parallel()):
        model = nn.Sequential(block, nn.Linear(16, 3))
        dampen.regularize(model, dampen.SkipAblation(attention=True))
        for training in (True, False):
            with pytest.raises(RuntimeError, match="residual additions|in one sum, side by side"):
                model.train(training)(torch.randn(2, 5, 16))


class SideBySide(nn.Module):
    """x + attention + feed-forward, both of one norm: one skip around both."""

    def __init__(self):
        super().__init__()
        own = Block(16, 2, 16)
        self.norm, self.attn, self.mlp = own.norm1, own.attn, own.mlp

    def forward(self, x):
        h = self.norm(x)
        assert x.shape == h.shape  # to ask for a shape is not to read
        return x + self.attn(h) + self.mlp(h)


@pytest.mark.parametrize(("attention", "ffn"), CASES)
def test_one_skip_around_both_branches_cannot_be_taken_from_one(attention, ffn):
    torch.manual_seed(0)
    block, x = SideBySide(), torch.randn(2, 5, 16)
    expected = block(x)
    reg = dampen.regularize(block, dampen.SkipAblation(attention, ffn))
    with pytest.raises(
        RuntimeError, match="adds attention and ffn to the same input, side by side"
    ):
        block(x)
    reg.remove()
    with_paths = dampen.regularize(block, dampen.DropPath(0.0))  # the branches themselves are known
    torch.testing.assert_close(block(x), expected)
    with_paths.remove()


def test_autocast_keeps_the_dtype_of_the_stream():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=24)
    seen = []
    model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        dampen.regularize(model, dampen.SkipAblation(attention=True, ffn=True))
        model(x)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("skip", [True, False])
def test_convmixer_has_its_own_switch(skip):
    torch.manual_seed(0)
    model = ConvMixer(width=8, depth=2, kernel=3, patch_size=4, skip=skip)
    block = model.blocks[0].eval()
    x = torch.randn(2, 8, 4, 4)
    branch = block.norm1(block.act(block.depthwise(x)))
    expected = block.norm2(block.act(block.pointwise(add(skip, x, branch))))
    assert torch.equal(block(x), expected)


@pytest.mark.slow
def test_the_ablation_keeps_the_contracts():
    contracts = [
        "shapes_and_dtypes",
        "gradients_finite",
        "copies",
        "compiled",
        "checkpointed",
        "no_leak",
        "remove",
        "exported",
    ]
    check_regularizer(
        lambda: dampen.SkipAblation(True, True), subjects=["vit", "bert"], contracts=contracts
    )


def test_wrong_arguments():
    with pytest.raises(TypeError, match="attention"):
        dampen.SkipAblation(attention=0.1)


def test_torch_layers_leave_their_fused_path_while_anything_acts():
    """Monte-Carlo sampling acts in eval without gradient, where torch.nn would run one kernel for a whole layer."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        reg = dampen.regularize(model, dampen.DropKey(0.5))
        assert torch.equal(model(x), plain)
        with reg.mc_mode():
            assert not torch.equal(model(x), model(x))
