"""LayerDrop: whole layers per forward, and the pruned model afterwards."""

import pytest
import torch

import dampen
from dampen import LayerDrop, regularize
from dampen.methods.layer_drop import every_other, prune_layers
from reproductions.models.seq2seq import Seq2Seq


def vit(depth=4):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=depth, heads=2, mlp=16
    )


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_forward_is_the_model_without_the_dropped_layers():
    model, twin = vit(), vit()
    reg = regularize(model, LayerDrop(0.5))
    patterns = set()
    for seed in range(12):
        dropped = []
        for clone in reg.clones:
            original = clone.block

            def watched(x, y, original=original, dropped=dropped):
                out = original(x, y)
                dropped.append(torch.equal(out, x))
                return out

            object.__setattr__(clone, "block", watched)
        torch.manual_seed(seed)
        out = model(X)
        tokens = twin.embed(X)
        cls = (twin.cls_token + twin.pos_embed[:, :1]).expand(len(X), -1, -1)
        x = torch.cat([cls, tokens], 1)
        for block, gone in zip(twin.blocks, dropped, strict=True):
            x = x if gone else block(x)
        torch.testing.assert_close(out, twin.head(twin.norm(x)[:, 0]))
        patterns.add(tuple(dropped))
        for clone in reg.clones:
            object.__delattr__(clone, "block")
    assert len(patterns) > 4


def test_rate_and_one_draw_for_the_whole_batch():
    torch.manual_seed(0)
    method, x, y = LayerDrop(0.2), torch.zeros(4, 2, 3), torch.ones(4, 2, 3)
    outs = torch.stack([method.block(x, y) for _ in range(5000)])
    assert ((outs == 1).flatten(1).all(1) | (outs == 0).flatten(1).all(1)).all()
    assert abs((outs.flatten(1)[:, 0] == 0).double().mean().item() - 0.2) < 4 * (0.16 / 5000) ** 0.5


def test_a_dropped_layer_has_zero_gradients_not_none():
    """Mask, never skip: DDP needs a gradient of every parameter on every rank."""
    model = vit(1)
    method = LayerDrop(0.999)
    regularize(model, method)
    torch.manual_seed(0)
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())
    assert all((p.grad == 0).all() for p in model.blocks.parameters())


def test_a_layer_that_changes_the_shape_cannot_be_skipped():
    with pytest.raises(ValueError, match="cannot be skipped"):
        LayerDrop(0.1).block(torch.ones(1, 4, 2), torch.ones(1, 2, 2))


@pytest.mark.parametrize(
    ("layers", "rate", "out"),
    [(12, 0.5, [1, 3, 5, 7, 9, 11]), (12, 0.25, [3, 7, 11]), (5, 1 / 3, [2]), (1, 0.5, [])],
)
def test_every_other(layers, rate, out):
    assert every_other(layers, rate) == out


@pytest.mark.parametrize("rate", [0, 0.6, 1, True, "half"])
def test_bad_pruning_rates(rate):
    with pytest.raises(ValueError, match=r"in \(0, 0.5\]"):
        every_other(4, rate)


def test_pruned_model_is_the_model_without_those_layers():
    model, twin = vit(), vit()
    assert prune_layers(model, 0.5) == ["blocks.1", "blocks.3"]
    del twin.blocks[3], twin.blocks[1]
    assert torch.equal(model(X), twin(X))


def test_pruning_a_regularized_model_is_refused():
    model = vit()
    regularize(model, LayerDrop(0.1))
    with pytest.raises(ValueError, match="remove"):
        prune_layers(model)


def test_pruning_a_hugging_face_model_renumbers_its_layers_so_that_generation_works():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=19,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 19, (1, 5))
    assert prune_layers(model) == ["model.layers.1", "model.layers.3"]
    assert model.config.num_hidden_layers == 2
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    cached = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)
    whole = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False, pad_token_id=0)
    assert torch.equal(cached, whole)


def test_each_stack_of_a_sequence_model_is_pruned_by_itself():
    model = Seq2Seq(source_vocab=11, target_vocab=11, width=16, depth=2, heads=2, mlp=16)
    taken = prune_layers(model)
    assert len(taken) == 2
    assert {name.split(".")[-1] for name in taken} == {"1"}
