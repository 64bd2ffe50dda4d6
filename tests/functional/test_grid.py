"""The patch grid behind a row of tokens: given, guessed, or told by the model."""

import pytest
import torch

import dampen
from dampen import BlurredAttention, DropKey, regularize
from dampen.functional.grid import grid_of, model_grid

IMAGES = torch.randn(2, 3, 8, 8)


def vit(**arguments):
    return dampen.models.ViT(
        **{"image_size": 8, "patch_size": 2, "width": 16, "depth": 1, "heads": 2, "mlp": 16}
        | arguments
    )


@pytest.mark.parametrize("grid", [(3, 4), (2, 8), (4, 3)])
@pytest.mark.parametrize(
    "method",
    [
        lambda grid: BlurredAttention(grid=grid),
        lambda grid: DropKey(0.3, unit="block", window=2, grid=grid),
    ],
)
def test_a_grid_that_is_not_the_models_is_refused(method, grid):
    """4 x 4 patches and a class token: 5 more prefix tokens, or another shape with as many patches, would be silent."""
    model = vit()
    regularize(model, method(grid))
    with pytest.raises(
        ValueError,
        match=r"does not match the model: its patches lie on \(4, 4\). Give grid=\(4, 4\)",
    ):
        model(IMAGES)


def test_the_models_own_grid_is_taken_where_none_is_given():
    model = vit(image_size=(8, 16))
    regularize(model, DropKey(0.5, unit="block", window=2))  # 4 x 8 patches are no square
    model(torch.randn(2, 3, 8, 16)).sum().backward()
    assert grid_of(33, None, patches=(4, 8)) == (4, 8)


def test_windows_have_grids_of_their_own():
    assert grid_of(49, None, patches=(56, 56)) == (7, 7)
    assert grid_of(49, (7, 7), patches=(56, 56)) == (7, 7)


def test_models_tell_their_grid():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    assert model_grid(transformers.ViTModel(config)) == (14, 14)
    timm = pytest.importorskip("timm")
    assert model_grid(timm.create_model("vit_tiny_patch16_224", depth=1)) == (14, 14)
    assert model_grid(vit(image_size=(8, 12))) == (4, 6)
    assert (
        model_grid(
            dampen.models.FeatureEncoder(features=4, width=16, depth=1, heads=2, mlp=16, classes=2)
        )
        is None
    )
