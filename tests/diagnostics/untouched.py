"""A small model to measure, and whether a measurement has left it as it was."""

import torch

import dampen


def small_vit(**arguments):
    torch.manual_seed(0)
    sizes = {
        "image_size": 16,
        "patch_size": 4,
        "width": 12,
        "depth": 3,
        "heads": 2,
        "mlp": 20,
        **arguments,
    }
    return dampen.models.ViT(**sizes)


def images(n=3, side=16):
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(1))


def snapshot(model):
    """All that a measurement must not change."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    modules = {
        n: (type(m), m.training, sorted(vars(m)), len(m._forward_hooks))
        for n, m in model.named_modules()
    }
    return state, modules, torch.get_rng_state()


def assert_unchanged(model, before):
    state, modules, rng = snapshot(model)
    assert modules == before[1]
    assert torch.equal(rng, before[2])
    assert all(torch.equal(v, before[0][k]) for k, v in state.items())
