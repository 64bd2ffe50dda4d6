"""Condition numbers against numpy on tokens caught by hand, on every family of models, leaving no trace in them."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

import dampen
from dampen.diagnostics.conditioning import (
    ConditionProbe,
    condition_of,
    measure_conditioning,
)
from reproductions.models.convmixer import ConvMixer
from reproductions.models.seq2seq import Seq2Seq
from tests.diagnostics.untouched import assert_unchanged, images, small_vit, snapshot

KINDS = ["tokens", "attention", "attention+skip", "ffn", "ffn+skip"]


def by_hand(model, x):
    """The tokens around each branch of an own ViT, in float64 by numpy."""
    model = model.eval()
    x = torch.cat(
        [(model.cls_token + model.pos_embed[:, :1]).expand(len(x), -1, -1), model.embed(x)], dim=1
    )
    for b in model.blocks:
        found = {"tokens": x}
        found["attention"] = b.attn(b.norm1(x) if b.norm_first else x)
        found["attention+skip"] = x + found["attention"]
        h = found["attention+skip"] if b.norm_first else b.norm1(found["attention+skip"])
        found["ffn"] = b.mlp(b.norm2(h) if b.norm_first else h)
        found["ffn+skip"] = h + found["ffn"]
        x = found["ffn+skip"] if b.norm_first else b.norm2(found["ffn+skip"])
        yield {kind: np.linalg.cond(t.detach().double().numpy()) for kind, t in found.items()}


@pytest.mark.parametrize("norm_first", [True, False])
def test_against_numpy(norm_first):
    model = small_vit(norm_first=norm_first)
    result = measure_conditioning(model, images())
    expected = list(by_hand(model, images()))
    assert [layer.name for layer in result.layers] == ["blocks.0", "blocks.1", "blocks.2"]
    for layer, hand in zip(result.layers, expected, strict=True):
        assert list(layer.conditions) == KINDS
        for kind, condition in layer.conditions.items():
            np.testing.assert_allclose(condition.numbers, hand[kind], rtol=1e-3)
            assert condition.log_mean == pytest.approx(np.log(hand[kind]).mean(), rel=1e-4)
            assert condition.log_sd == pytest.approx(
                np.log(hand[kind]).std(ddof=1), rel=1e-2, abs=1e-5
            )
    assert "attention+skip" in str(result)


def test_double_runs_a_copy_in_float64():
    model = small_vit()
    expected = list(by_hand(copy.deepcopy(model).double(), images().double()))
    result = measure_conditioning(model, images(), double=True)
    for layer, hand in zip(result.layers, expected, strict=True):
        for kind, condition in layer.conditions.items():
            np.testing.assert_allclose(condition.numbers, hand[kind], rtol=1e-8)
    assert next(model.parameters()).dtype == torch.float32


def test_spectrum_and_samples():
    result = measure_conditioning(small_vit(), images(5), samples=2, spectrum=True)
    condition = result.layers[0].conditions["attention"]
    assert condition.spectrum.shape == (2, 12)
    ratio = condition.spectrum[:, 0] / condition.spectrum[:, -1]
    torch.testing.assert_close(ratio, torch.tensor(condition.numbers, dtype=torch.float64))
    assert len(json.loads(json.dumps(result.to_json()))[0]["attention"]["spectrum"]) == 12


def test_singular_and_empty_matrices_are_finite():
    condition = condition_of(torch.stack([torch.zeros(4, 3), torch.ones(4, 3), torch.eye(4, 3)]))
    assert condition.numbers[2] == 1
    assert all(1e13 < k < 1e16 for k in condition.numbers[:2])
    with pytest.raises(ValueError, match="diverged"):
        condition_of(torch.full((1, 2, 2), torch.nan))


def test_padding_does_not_count():
    x = torch.randn(2, 6, 4)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 3:] = False
    numbers = condition_of(x, valid).numbers
    np.testing.assert_allclose(numbers[0], np.linalg.cond(x[0].double().numpy()))
    np.testing.assert_allclose(numbers[1], np.linalg.cond(x[1, :3].double().numpy()))


def families():
    import timm
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel

    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
    }
    ids = {"input_ids": torch.randint(1, 19, (2, 7))}
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    yield small_vit(), images(2)
    yield (
        timm.create_model(
            "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=2
        ),
        images(2),
    )
    yield (
        timm.create_model(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=2,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 2),
        ),
        images(2, 32),
    )
    yield ViTModel(ViTConfig(**sizes, image_size=16, patch_size=4)), {"pixel_values": images(2)}
    yield BertModel(BertConfig(**sizes, vocab_size=19)), {**ids, "attention_mask": mask}
    yield LlamaModel(LlamaConfig(**sizes, vocab_size=19)), ids
    for norm_first in (True, False):
        layer = nn.TransformerEncoderLayer(
            12, 2, 20, norm_first=norm_first
        )  # (N, B, D), with dropout
        yield nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(7, 2, 12)
    sequences = (torch.randint(1, 9, (2, 7)), torch.randint(1, 9, (2, 5)))
    yield Seq2Seq(9, 9, width=12, depth=2, heads=2, mlp=20), sequences


@pytest.mark.parametrize("index", range(9))
@pytest.mark.parametrize("regularized", [False, True])
def test_any_supported_model_is_left_as_it_was(index, regularized):
    torch.manual_seed(0)
    model, inputs = list(families())[index]
    model.train()
    plain = measure_conditioning(model, inputs)
    if regularized:
        reg = dampen.regularize(model, [dampen.DropKey(0.2), dampen.FeedForwardDropout(0.1)])
        printed = str(reg)
    before = snapshot(model)
    result = measure_conditioning(model, inputs)
    assert_unchanged(model, before)
    assert len(result.layers) >= 2
    for layer, same in zip(result.layers, plain.layers, strict=True):
        assert set(KINDS) <= set(layer.conditions)
        for kind, condition in layer.conditions.items():
            assert len(condition.numbers) == 2
            np.testing.assert_allclose(
                condition.log_mean, same.conditions[kind].log_mean, rtol=1e-3
            )
    if regularized:
        assert str(reg) == printed
        reg.remove()


def test_decoder_blocks_name_their_second_attention():
    *_, (model, inputs) = families()
    layers = measure_conditioning(model, inputs).layers
    assert {"attention2", "attention2+skip"} <= set(layers[-1].conditions)


def test_partly_regularized_model():
    model = small_vit()
    plain = measure_conditioning(model, images())
    reg = dampen.regularize(model, dampen.DropKey(0.5), target_modules="blocks.1*")
    before = snapshot(model)
    result = measure_conditioning(model, images())
    assert_unchanged(model, before)
    assert result == plain
    reg.remove()
    assert measure_conditioning(model, images()) == plain


def test_pending_penalties_survive():
    class Weigh(dampen.Regularizer):
        """Any penalty."""

        def heads(self, o, call):
            self.penalize(o.square().mean())
            return o

    model = small_vit().train()
    reg = dampen.regularize(model, Weigh())
    model(images())
    measure_conditioning(model, images())
    assert reg.penalty() > 0


def test_under_skip_ablation_the_branch_is_what_goes_on():
    """What the next sublayer reads is then the branch alone; 'with the skip' is what it would have been."""
    model = small_vit()
    reg = dampen.regularize(model, dampen.SkipAblation(attention=True, ffn=True))
    layers = measure_conditioning(model, images()).layers
    for this, following in itertools.pairwise(layers):
        assert this.conditions["ffn"] == following.conditions["tokens"]
        assert this.conditions["ffn+skip"] != following.conditions["tokens"]
    with reg.disable():
        off = measure_conditioning(model, images())
    reg.remove()
    assert off == measure_conditioning(model, images())


def test_token_graying_is_measured_with_its_input_grayed():
    model = small_vit()
    plain = measure_conditioning(model, dampen.functional.graying.gray_images(images(), 4, "svd"))
    dampen.regularize(model, dampen.TokenGraying("svd"))
    result = measure_conditioning(model, images())
    assert result.layers[0].conditions["tokens"].log_mean == pytest.approx(
        plain.layers[0].conditions["tokens"].log_mean
    )


def test_compiled_model_runs_eagerly():
    model = small_vit()
    compiled = torch.compile(model, backend="eager")
    assert measure_conditioning(compiled, images()) == measure_conditioning(model, images())


def test_an_error_in_the_model_leaves_no_probe():
    model = small_vit()
    before = snapshot(model)
    with pytest.raises(ValueError, match="built for images"):
        measure_conditioning(model, images(2, 24))
    assert_unchanged(model, before)


# --- the callback -----------------------------------------------------------------------------------------------------


def test_probe_answers_every_k_steps_in_plain_data():
    model, probe = small_vit(), ConditionProbe(every=5, samples=2)
    x, y = images(4), torch.zeros(4, dtype=torch.long)
    for batch in ((x, y), {"inputs": (x,), "target": y}, {"images": x, "labels": y}, x):
        answers = [probe(step, model, batch) for step in range(6)]
        assert [bool(a) for a in answers] == [True, False, False, False, False, True]
        plain = json.loads(json.dumps(answers[5]))
        assert plain["step"] == 5
        assert plain["layers"][2]["attention"]["n"] == 2
        assert plain["layers"][0]["name"] == "blocks.0"


def test_probe_does_not_disturb_training():
    """The same losses with and without it, dropout and all."""

    def losses(probe):
        model = small_vit().train()
        reg = dampen.regularize(model, dampen.DropKey(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        torch.manual_seed(3)
        for step in range(4):
            probe(step, model, (images(), torch.arange(3)))
            loss, _ = reg.loss(
                lambda: model(images()),
                lambda out: nn.functional.cross_entropy(out, torch.arange(3)),
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(ConditionProbe(every=2)) == losses(lambda *_: {})


def test_wrong_arguments():
    with pytest.raises(ValueError, match="every"):
        ConditionProbe(every=0)
    with pytest.raises(ValueError, match="no attention"):
        measure_conditioning(ConvMixer(width=8, depth=1, kernel=3), images(1, 32))


def test_numbers_at_the_ceiling_are_marked():
    assert condition_of(torch.ones(2, 4, 4)).capped == 2
    assert condition_of(torch.eye(4).expand(2, 4, 4)).capped == 0
