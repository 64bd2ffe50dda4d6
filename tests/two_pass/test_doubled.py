"""One doubled batch for two passes: the same loss and gradients where nothing is drawn, the same distribution where
something is, and two passes, with the reason, wherever a batch is more than its samples."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import Consistency, DropHead, DropKey, RDrop, linear, regularize
from dampen.two_pass import doubled
from dampen.two_pass.doubled import BEGUN_APART

X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2])
LATER = linear(0.0, 0.4, along="progress")  # 0 now, and not for good


def vit(cls=dampen.models.ViT, **options):
    torch.manual_seed(0)
    return cls(image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16, **options)


def attach(model, methods, apart=False):
    reg = regularize(model, copy.deepcopy(methods))
    if apart:
        reg.prefix.doubled.why = "the test wants two passes"
    return reg


def step(reg, forward=None, seed=5):
    model = reg.model
    model.zero_grad()
    torch.manual_seed(seed)
    loss, terms = reg.loss(
        (lambda: forward(model)) if forward else (lambda: model(X)),
        lambda out: F.cross_entropy(out, Y),
    )
    loss.backward()
    return (
        loss.detach(),
        terms,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def assert_same(first, second):
    torch.testing.assert_close(first[0], second[0], rtol=1e-6, atol=1e-6)
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        torch.testing.assert_close(value, second[1][name], rtol=1e-6, atol=1e-6, msg=name)
    assert first[2].keys() == second[2].keys()
    for name, gradient in first[2].items():
        torch.testing.assert_close(gradient, second[2][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "methods",
    [
        [DropHead(LATER), RDrop(1.0)],
        [DropKey(LATER), dampen.DropPath(LATER), dampen.HiddenDropout(LATER), Consistency(0.5)],
        [dampen.TokenGraying(), dampen.FeedForwardDropout(LATER), RDrop(1.0)],
    ],
)
def test_without_draws_a_doubled_batch_is_two_passes(methods):
    together, apart = attach(vit(), methods), attach(vit(), methods, apart=True)
    assert_same(step(together), step(apart))
    assert together.prefix.doubled.used
    assert not apart.prefix.doubled.used
    assert "one batch that holds every sample twice" in repr(together)
    assert "two full passes" in repr(apart)


def test_the_blocks_run_once_and_the_users_function_twice():
    model, calls = vit(), []
    reg = attach(model, [DropHead(0.3), RDrop(1.0)])
    step(reg)  # looks at the form of the input
    run = type(model.blocks[0].mlp).forward
    model.blocks[0].mlp.forward = lambda x: calls.append(len(x)) or run(model.blocks[0].mlp, x)
    seen = []
    step(reg, lambda m: seen.append(out := m(X)) or out * 2)
    assert calls == [6]
    assert [o.shape for o in seen] == [(3, 3), (3, 3)]
    assert not torch.equal(*seen)


def test_halves_may_be_changed_in_place():
    reg, apart = (attach(vit(), [DropHead(LATER), RDrop(1.0)], apart) for apart in (False, True))
    assert_same(step(reg, lambda m: m(X).mul_(2)), step(apart, lambda m: m(X).mul_(2)))
    assert reg.prefix.doubled.used


@pytest.mark.parametrize(
    "methods",
    [
        [DropHead(0.5), RDrop(1.0)],
        [DropKey(0.4), dampen.DropPath(0.3), RDrop(1.0)],
        [dampen.PatchDropout(0.5), dampen.HardMasking(0.5, top=0.5), RDrop(1.0)],
    ],
)
def test_the_distribution_of_loss_and_penalty_is_that_of_two_passes(methods):
    """Halves that shared a draw would agree too well: their divergence would be smaller."""
    found = []
    for apart in (False, True):
        reg = attach(vit(), methods, apart)
        torch.manual_seed(7)
        with torch.no_grad():
            terms = [
                reg.loss(lambda m=reg.model: m(X), lambda o: F.cross_entropy(o, Y))[1]
                for _ in range(300)
            ]
        assert reg.prefix.doubled.used is not apart
        found.append(torch.tensor([[t["task"], t["r_drop"]] for t in terms]))
    error = sum(f.var(0) / len(f) for f in found).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() < 4 * error).all()
    assert (found[0].std(0) / found[1].std(0) - 1).abs().max() < 0.35


class OwnDraw(dampen.models.ViT):
    """Drops the whole batch's last block, by a draw in its own code."""

    def forward(self, x):
        return super().forward(x) * (torch.rand(()) + 0.5)


class Mixing(dampen.models.ViT):
    """Samples see each other."""

    def forward(self, x):
        out = super().forward(x)
        return out - out.mean(0)


class Loss(dampen.models.ViT):
    def forward(self, x):
        out = super().forward(x)
        return out, out.square().mean()


class Listed(dampen.models.ViT):
    def forward(self, xs):
        return super().forward(xs[0])


class Masked(dampen.models.ViT):
    """Its second input has no batch, though it may begin with a number that is one."""

    def forward(self, x, weights):
        return super().forward(x) @ weights


class SharedDropHead(DropHead):
    """A user's method whose draw a batch shares; DropHead's word is not its own."""

    def heads(self, o, call):
        return super().heads(o[:1], call) / o[:1] * o


class BatchNormed(dampen.models.ViT):
    def __init__(self, **options):
        super().__init__(**options)
        self.last = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.last(super().forward(x))


def hooked():
    model = vit()
    model.blocks[0].register_forward_hook(lambda m, a, o: None)
    return model


def with_layerdrop():
    model = vit()
    model.blocks[1].layerdrop = 0.1
    return model


HEAD = [DropHead(0.3), RDrop(1.0)]


@pytest.mark.parametrize(
    ("make", "methods", "forward", "says"),
    [
        (vit, [dampen.LayerDrop(0.3), RDrop(1.0)], None, "LayerDrop may draw"),
        (vit, [dampen.BlurredAttention(), RDrop(1.0)], None, "BlurredAttention may draw"),
        (vit, [dampen.DropConnect(0.3), RDrop(1.0)], None, "DropConnect may draw"),
        (vit, [SharedDropHead(0.3), RDrop(1.0)], None, "SharedDropHead may draw"),
        (vit, [*HEAD, dampen.HeadDiversity(1.0)], None, "HeadDiversity may draw, or average"),
        (
            vit,
            [DropHead(0.3), dampen.ExplicitDropout(value=1.0), RDrop(1.0)],
            None,
            "ExplicitDropout may draw",
        ),
        (lambda: vit(OwnDraw), HEAD, None, "draws at random in its own code"),
        (lambda: vit(Mixing), HEAD, None, "not independent"),
        (lambda: vit(BatchNormed), HEAD, None, "statistics of the batch"),
        (lambda: vit(Loss), HEAD, lambda m: m(X)[0], "does not begin with the batch"),
        (lambda: vit(Listed), HEAD, lambda m: m([X]), "gets no tensor"),
        (lambda: vit(Masked), HEAD, lambda m: m(X, torch.eye(3)), "a doubled batch fails"),
        (hooked, HEAD, None, "a hook on a"),
        (with_layerdrop, HEAD, None, "perhaps once for the batch"),
        (vit, HEAD, lambda m: m(X.clone().requires_grad_()), "gradient of its own"),
        (vit, HEAD, lambda m: checkpoint(m, X, use_reentrant=False), "checkpointing"),
        (vit, HEAD, lambda m: m(X[:1]).expand(3, -1), "a batch of several"),
    ],
)
def test_two_passes_where_a_batch_is_more_than_its_samples(make, methods, forward, says):
    reg, apart = attach(make(), methods), attach(make(), methods, apart=True)
    assert_same(step(reg, forward), step(apart, forward))
    assert says in reg.prefix.doubled.note
    assert not reg.prefix.doubled.used
    assert f"no doubled batch: {reg.prefix.doubled.note}" in repr(reg)


class InnerCheckpoint(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            block.norm1,
            block.attn,
            block.norm2,
            block.mlp,
        )

    def forward(self, x, keep=None):
        x = x + checkpoint(self.attn, self.norm1(x), use_reentrant=False)
        return x + self.mlp(self.norm2(x))


def test_checkpoints_inside_replay_the_doubled_draws():
    plain, inner = attach(vit(), HEAD), vit()
    inner.blocks = nn.ModuleList(InnerCheckpoint(block) for block in inner.blocks)
    inner = attach(inner, HEAD)
    assert_same(step(inner), step(plain))
    assert plain.prefix.doubled.used
    assert inner.prefix.doubled.used


def test_autocast_and_other_libraries_models():
    timm = pytest.importorskip("timm")

    def make():
        torch.manual_seed(0)
        return timm.create_model(
            "vit_tiny_patch16_224", img_size=8, patch_size=4, num_classes=3, depth=2
        )

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float()

    later = [DropHead(LATER), RDrop(1.0)]
    together, apart = attach(make(), later), attach(make(), later, apart=True)
    assert_same(step(together), step(apart))
    assert together.prefix.doubled.used
    torch.testing.assert_close(
        step(together, forward)[0], step(apart, forward)[0], rtol=0.02, atol=0.02
    )
    assert together.prefix.doubled.used


def test_a_model_that_is_not_small_takes_two_passes(monkeypatch):
    monkeypatch.setattr(doubled, "DOUBLED_BELOW", 3 * 5 * 16 - 1)
    reg = attach(vit(), HEAD)
    step(reg)
    assert "240 numbers enter a block" in reg.prefix.doubled.note
    monkeypatch.setattr(doubled, "DOUBLED_BELOW", 3 * 5 * 16)
    reg = attach(vit(), HEAD)
    step(reg)
    assert reg.prefix.doubled.used


def test_inputs_that_differ_between_the_passes_end_it():
    inputs = [X, X + 1, X, X + 1]
    results = []
    for apart in (False, True):
        reg, left = attach(vit(), [DropHead(LATER), RDrop(1.0)], apart), list(inputs)
        first = step(reg, lambda m, left=left: m(left.pop(0)))
        results.append((first, step(reg, lambda m, left=left: m(left.pop(0)))))
        if not apart:
            assert "differs between the passes" in reg.prefix.doubled.why
    for one, two in zip(*results, strict=True):
        assert_same(one, two)


def test_a_model_that_runs_twice_in_one_pass():
    results = [
        step(attach(vit(), [DropHead(LATER), RDrop(1.0)], apart), lambda m: m(X) + m(X + 1))
        for apart in (0, 1)
    ]
    assert_same(*results)


def test_compiled_models_and_inference_mode_take_two_passes():
    reg = attach(vit(), HEAD)
    with torch.inference_mode():
        reg.loss(lambda: reg.model(X), lambda out: F.cross_entropy(out, Y))
    assert "inference" in reg.prefix.doubled.note
    compiled = torch.compile(reg.model, backend="eager")
    torch.manual_seed(0)
    reg.loss(lambda: compiled(X), lambda out: F.cross_entropy(out, Y))
    assert not reg.prefix.doubled.used


def test_a_training_goes_on_as_it_began():
    reg = attach(vit(), HEAD)
    step(reg)
    state, weights = reg.state_dict(), copy.deepcopy(reg.model.state_dict())
    expected = step(reg, seed=6)
    again = attach(vit(), HEAD)
    again.model.load_state_dict(weights)
    again.load_state_dict(state)
    found = step(again, seed=6)
    assert torch.equal(found[0], expected[0])
    before = {k: v for k, v in state.items() if k != "never_doubled"}  # as 0.1 wrote it
    old = attach(vit(), HEAD)
    old.load_state_dict(before)
    assert_same(step(old), step(attach(vit(), HEAD, apart=True)))
    assert BEGUN_APART in repr(old)
    assert old.state_dict()["never_doubled"] == BEGUN_APART
    assert "never_doubled" not in attach(vit(), [DropHead(0.3)]).state_dict()


def test_nothing_is_kept_and_copies_step_for_themselves():
    reg = attach(vit(), HEAD)
    expected = step(reg)
    assert reg.prefix.doubled.second is None
    assert reg.prefix.doubled.asked is None
    for other in (copy.deepcopy(reg), pickle.loads(pickle.dumps(reg))):
        assert_same(step(other), expected)
        assert other.prefix.doubled.used
        assert other.prefix.doubled is other.model._dampen_model.doubled
        assert other.prefix.doubled is not reg.prefix.doubled


def test_an_error_inside_leaves_the_next_step_whole():
    reg = attach(vit(), HEAD)
    with pytest.raises(ZeroDivisionError):
        reg.loss(lambda: reg.model(X) / (1 // 0), lambda out: out.mean())
    assert_same(step(reg), step(attach(vit(), HEAD)))
