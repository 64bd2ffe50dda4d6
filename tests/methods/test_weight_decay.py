"""Weight decay against one number at a time, against AdamW's own, and on the right parameters."""

import copy
import itertools

import pytest
import torch
from torch import nn

import dampen
from dampen import WeightDecay, linear, regularize
from tests.oracles.weights import adam_with_decay


def vit(depth=2):
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3, "width": 16, "heads": 2, "mlp": 16}
    return dampen.models.ViT(depth=depth, **sizes)


X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("cautious", [False, True])
def test_adam_with_decay_one_number_at_a_time(cautious):
    model = vit()
    weight = model.blocks[0].mlp.fc1.weight
    reg = regularize(model, WeightDecay(0.3, cautious=cautious))
    optimizer = torch.optim.Adam([weight], lr=0.05)
    reg.attach_optimizer(optimizer)
    start, generator = weight.detach().clone(), torch.Generator().manual_seed(3)
    gradients = [torch.randn(weight.shape, generator=generator) for _ in range(4)]
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    expected = adam_with_decay(
        start.flatten().tolist(),
        [g.flatten().tolist() for g in gradients],
        rate=0.3,
        lr=0.05,
        cautious=cautious,
    )
    torch.testing.assert_close(weight.flatten(), torch.tensor(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [0.0, 0.2])
def test_under_adamw_it_is_the_only_decay(own):
    """Contract: whatever decay AdamW has itself, the weights are those of AdamW with this rate."""
    model, plain = vit(), vit()
    reg = regularize(model, WeightDecay(0.1))
    groups = [[p for p in plain.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    theirs = torch.optim.AdamW(
        [{"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True)], lr=0.01
    )
    ours = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=own)
    if own:
        with pytest.warns(
            UserWarning, match=r"WeightDecay replaces the weight decay of AdamW \(0.2"
        ):
            reg.attach_optimizer(ours)
    else:
        reg.attach_optimizer(ours)
    train(model, ours)
    train(plain, theirs)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
    reg.remove()
    assert ours.param_groups[0]["weight_decay"] == own


def test_under_adam_the_coupled_decay_is_replaced_too():
    model, plain = vit(), vit()
    reg = regularize(model, WeightDecay(0.1))
    coupled = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.3)
    with pytest.warns(UserWarning, match="replaces the weight decay of Adam"):
        reg.attach_optimizer(coupled)
    clean = regularize(plain, WeightDecay(0.1))
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    clean.attach_optimizer(adam)
    train(model, coupled)
    train(plain, adam)
    assert torch.equal(model.head.weight, plain.head.weight)


def test_a_loaded_optimizer_state_does_not_bring_its_own_decay_back():
    model = vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    reg = regularize(model, WeightDecay(0.1))
    with pytest.warns(UserWarning, match="replaces"):
        reg.attach_optimizer(optimizer)
    optimizer.load_state_dict(before)
    with pytest.warns(UserWarning, match="replaces"):
        train(model, optimizer, steps=1)
    assert optimizer.param_groups[0]["weight_decay"] == 0


def decayed(model, methods, names, **options):
    """By how much each named parameter shrinks in a step of SGD with gradients of 0."""
    reg = regularize(model, methods, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg.attach_optimizer(optimizer)
    parameters = dict(model.named_parameters())
    before = {n: parameters[n].detach().clone() for n in names}
    for p in parameters.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return {n: round(1 - (parameters[n].norm() / before[n].norm()).item(), 4) for n in names}


NAMES = [
    "patch_embed.proj.weight",
    *(f"blocks.{i}.mlp.fc1.weight" for i in range(3)),
    "head.weight",
]


def test_the_rate_follows_depth_and_embeddings_and_head_count_to_the_ends():
    found = decayed(vit(3), WeightDecay(linear(0.1, 0.3)), NAMES)
    assert list(found.values()) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.3], abs=1e-3)


def test_only_the_layers_chosen_decay():
    found = decayed(vit(3), WeightDecay(0.2), NAMES, target_modules="blocks.1*")
    assert list(found.values()) == pytest.approx([0, 0, 0.2, 0, 0], abs=1e-3)


@pytest.mark.parametrize(("all_of_them", "share"), [(False, 0.0), (True, 0.2)])
def test_norms_and_biases(all_of_them, share):
    names = ["blocks.0.norm1.weight"]
    found = decayed(vit(), WeightDecay(0.2, norms_and_biases=all_of_them), names)
    assert found[names[0]] == pytest.approx(share, abs=1e-3)


def test_it_follows_progress_and_rests_where_the_handle_is_disabled():
    model = vit()
    reg = regularize(model, WeightDecay(linear(0.5, 0.0, "progress")))
    weight = model.head.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    reg.attach_optimizer(optimizer)
    norms = [weight.norm().item()]
    for progress in (0.0, 0.5, 1.0):
        reg.progress(progress)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        norms.append(weight.norm().item())
    ratios = [b / a for a, b in itertools.pairwise(norms)]
    assert ratios == pytest.approx([0.5, 0.75, 1.0], abs=1e-5)
    reg.progress(0.0)
    with reg.disable():
        optimizer.step()
    assert weight.norm().item() == norms[-1]


def test_a_parameter_without_gradient_stays():
    model = vit()
    reg = regularize(model, WeightDecay(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reg.attach_optimizer(optimizer)
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.head.weight, before)


def test_training_without_the_optimizer_is_refused():
    reg = regularize(vit(), WeightDecay(0.1))
    reg.penalty()  # nothing has been trained yet
    train(reg.model, torch.optim.SGD(reg.model.parameters(), lr=0.1), steps=1)
    for use in (
        lambda: reg.loss(lambda: reg.model(X), lambda out: out.sum()),
        lambda: reg.penalty(),
        lambda: reg.model(X),
    ):
        with pytest.raises(RuntimeError, match="Call reg.attach_optimizer"):
            use()
    with pytest.raises(TypeError, match="got Linear"):
        reg.attach_optimizer(nn.Linear(1, 1))


def test_loaded_weights_are_no_training():
    """Contract: whatever is loaded before training, in whatever order, nothing is refused."""
    reg = regularize(vit(), WeightDecay(0.1))
    reg.model.load_state_dict(vit().state_dict())
    reg.progress(0.0)
    train(reg.model, torch.optim.SGD(reg.model.parameters(), lr=0.0), steps=0)
    reg.model(X)
    reg.model.load_state_dict(vit().state_dict())
    reg.load_state_dict(reg.state_dict())
    reg.model(X)
    reg.penalty()


def test_a_copy_without_its_handle_is_refused_too():
    reg = regularize(vit(), WeightDecay(0.1))
    reg.attach_optimizer(torch.optim.SGD(reg.model.parameters(), lr=0.1))
    train(reg.model, reg.model._dampen_model.attached[0].optimizer)
    twin = copy.deepcopy(reg.model)
    with pytest.raises(RuntimeError, match=r"dampen.remove\(copy\) makes it plain"):
        train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), steps=2)


@pytest.mark.parametrize("through", ["reg.remove()", "dampen.remove(model)"])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.filterwarnings("ignore:WeightDecay replaces")
def test_removed_it_leaves_the_optimizer_as_it_was(through, loaded):
    model = vit()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups)
    before = copy.deepcopy(optimizer.state_dict())
    reg = regularize(model, WeightDecay(0.2))
    reg.attach_optimizer(optimizer)
    if loaded:
        optimizer.load_state_dict(before)
        train(model, optimizer, steps=1)
        optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    reg.remove() if through == "reg.remove()" else dampen.remove(model)
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_attached_twice_it_decays_once():
    model = vit()
    reg = regularize(model, WeightDecay(0.2))
    optimizer = torch.optim.SGD([model.head.weight], lr=1.0)
    reg.attach_optimizer(optimizer)
    reg.attach_optimizer(optimizer)
    before = model.head.weight.norm().item()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    optimizer.step()
    assert model.head.weight.norm().item() == pytest.approx(0.8 * before)


@pytest.mark.filterwarnings("ignore:WeightDecay")
def test_other_tensors_lent_by_functional_call_are_no_training():
    """Tensors that were changed in place stand for the weights, as in meta-learning."""
    reg = regularize(vit(), WeightDecay(0.1))
    reg.model(X)
    lent = {n: p.detach().clone().mul_(1).add_(0) for n, p in reg.model.named_parameters()}
    torch.func.functional_call(reg.model, lent, (X,))
    reg.penalty()
