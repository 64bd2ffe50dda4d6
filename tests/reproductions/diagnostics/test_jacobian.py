"""Condition numbers of Jacobians against the whole matrix."""

import copy
import json

import pytest
import torch

import dampen
from reproductions.diagnostics.jacobian import estimate_condition, measure_jacobian
from tests.diagnostics.untouched import assert_unchanged, images, small_vit, snapshot
from tests.oracles import skips as reference


def test_estimator_is_exact_with_all_steps_and_a_lower_bound_before():
    a = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    s = torch.linalg.svdvals(a)
    kappas = []
    for steps in (2, 8, 20, 30):
        found = estimate_condition(lambda v: a @ v, lambda u: a.mT @ u, 30, steps)
        assert found.largest <= s[0] * (1 + 1e-9)
        assert found.smallest >= s[-1] * (1 - 1e-9)
        kappas.append(found.kappa)
    assert kappas == sorted(kappas)
    assert kappas[-1] == pytest.approx((s[0] / s[-1]).item(), rel=1e-6)
    assert found.frobenius == pytest.approx(a.norm().item(), rel=0.3)
    assert estimate_condition(lambda v: a @ v, lambda u: a.mT @ u, 30, 12).largest == pytest.approx(
        s[0].item(), rel=0.02
    )


def test_estimator_sees_a_singular_matrix():
    a = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64))
    assert estimate_condition(lambda v: a @ v, lambda u: a.mT @ u, 4, 4).kappa > 1e12


@pytest.mark.parametrize("norm_first", [True, False])
def test_jacobians_of_a_vit_against_the_whole_matrix(norm_first):
    model = small_vit(image_size=8, depth=2, width=6, mlp=8, norm_first=norm_first)
    for p in model.parameters():
        p.requires_grad_(False)  # a frozen model has Jacobians too
    x = images(2, 8)
    before = snapshot(model)
    found = measure_jacobian(model, x, sample=1, steps=100)
    assert_unchanged(model, before)
    exact = copy.deepcopy(model).double().eval()
    tokens = torch.cat(
        [exact.cls_token + exact.pos_embed[:, :1], exact.embed(x[1:].double())], dim=1
    )
    for i, b in enumerate(exact.blocks):
        branches = {
            "attention": lambda t, b=b: b.attn(b.norm1(t) if norm_first else t),
            "ffn": lambda t, b=b: b.mlp(b.norm2(t) if norm_first else t),
        }
        stream = {"attention": tokens}
        after = tokens + branches["attention"](tokens)
        stream["ffn"] = after if norm_first else b.norm1(after)
        for role, f in branches.items():
            s = reference.jacobian_spectrum(f, stream[role])
            got = found[f"blocks.{i}"][role]
            assert got.size == 30
            assert got.largest == pytest.approx(s[0].item(), rel=1e-6)
            if (
                norm_first
            ):  # LayerNorm forgets mean and length of each token: singular up to its own epsilon
                assert got.kappa > 1e4
            else:
                assert got.kappa == pytest.approx((s[0] / s[-1]).item(), rel=1e-4)
            s = reference.jacobian_spectrum(lambda t, f=f: t + f(t), stream[role])
            assert found[f"blocks.{i}"][f"{role}+skip"].kappa == pytest.approx(
                (s[0] / s[-1]).item(), rel=1e-6
            )
        tokens = b(tokens)


def test_jacobians_of_a_library_model_and_of_a_regularized_one():
    from transformers import ViTConfig, ViTModel

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    model = ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4))
    plain = measure_jacobian(model, {"pixel_values": images(1, 8)}, steps=6)
    dampen.regularize(model, dampen.DropKey(0.3))
    again = measure_jacobian(model, {"pixel_values": images(1, 8)}, steps=6)
    for name, branches in plain.items():
        for role, condition in branches.items():
            assert again[name][role].kappa == pytest.approx(condition.kappa, rel=1e-6)
            json.dumps(condition.to_json())
