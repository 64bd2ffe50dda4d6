"""L2SP, AnchorKL, and the start of a fine-tuning: against the definitions, and with LoRA."""

import copy

import peft
import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import L2SP, AnchorKL, DropKey, regularize
from tests.families import FAMILIES, output
from tests.integrations.tiny import bert, llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(1, 13).view(2, 6)


def vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3, "width": 16, "heads": 2, "mlp": 16}
    return dampen.models.ViT(depth=2, **sizes)


def move(model, by=0.1):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=generator))


def maps_of(model):
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "blocks" in n]


def test_l2_sp_is_half_the_squared_distance_with_its_gradient():
    model = vit()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    reg = regularize(model, L2SP(0.3))
    move(model)
    model(X)
    found = reg.penalty()
    names = [f"{n}.weight" for n in maps_of(model)]
    weights = [model.get_parameter(n) for n in names]
    expected = sum(
        0.15 * (w - start[n]).square().sum() for n, w in zip(names, weights, strict=True)
    )
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found, weights)
    for name, w, gradient in zip(names, weights, gradients, strict=True):
        torch.testing.assert_close(gradient, 0.3 * (w - start[name]), msg=name)


def test_l2_sp_reads_the_maps_of_torchs_own_attention():
    family = FAMILIES["encoder_post"]
    model = family.model()
    reg = regularize(model, L2SP(2.0, targets="attention"))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    move(model)
    output(model(**family.inputs))
    names = [n for n in start if "self_attn" in n and n.endswith("weight")]
    expected = sum((model.get_parameter(n) - start[n]).square().sum() for n in names)
    torch.testing.assert_close(reg.penalty(), expected)


def test_anchor_kl_is_the_divergence_from_a_copy_made_at_the_start():
    model = vit()
    twin = copy.deepcopy(model).eval()
    reg = regularize(model, [AnchorKL(0.7), DropKey(0.3)])
    move(model)
    torch.manual_seed(3)
    outs = []
    loss, terms = reg.loss(lambda: outs.append(model(X)) or outs[-1], lambda out: out.sum())
    p0 = twin(X).detach()
    torch.testing.assert_close(outs[0], p0)
    expected = 0.7 * F.kl_div(
        outs[1].log_softmax(-1), p0.log_softmax(-1), reduction="batchmean", log_target=True
    )
    torch.testing.assert_close(terms["anchor_kl"], expected)
    loss.backward()
    assert model.training
    assert not reg.anchoring


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_autocast_sees_the_start_and_then_the_model(alpha):
    reg = regularize(vit().eval(), AnchorKL(1.0))
    move(reg.model, by=0.3)

    def fresh():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return reg.model(X)

    live = fresh()
    with reg.at_start():
        start = fresh()
    with reg.interpolate(alpha):
        between = fresh()
    with torch.autocast("cpu", torch.bfloat16):
        found = [reg.model(X)]
        with reg.at_start():
            found.append(reg.model(X))
        found.append(reg.model(X))
        with reg.interpolate(alpha):
            found.append(reg.model(X))
        found.append(reg.model(X))
    for a, b in zip(found, [live, start, live, between, live], strict=True):
        assert torch.equal(a, b)


def test_under_autocast_anchor_kl_is_of_the_start_and_every_weight_has_its_gradient():
    model = vit()
    twin = copy.deepcopy(model).eval()
    reg = regularize(model, AnchorKL(1.0))
    move(model, by=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        logs = [m(X).float().log_softmax(-1) for m in (model, twin)]
        loss, terms = reg.loss(lambda: model(X), lambda out: out.float().sum())
    expected = F.kl_div(*logs, reduction="batchmean", log_target=True)
    torch.testing.assert_close(terms["anchor_kl"], expected, rtol=0.05, atol=0.0)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def lora(base):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    torch.manual_seed(0)
    return peft.get_peft_model(base, config)


def test_with_lora_the_start_is_the_model_without_adapters_and_nothing_is_copied():
    base = llama()
    plain = base(input_ids=IDS).logits.detach()
    model = lora(base).train()
    reg = regularize(model, AnchorKL(1.0))
    move(model, by=0.5)
    assert reg.start.weights == {}
    with torch.no_grad(), reg.at_start():
        assert torch.equal(model(input_ids=IDS).logits, plain)
    moved = model.eval()(input_ids=IDS).logits.detach()
    assert not torch.allclose(moved, plain)
    with reg.interpolate(0.0):
        torch.testing.assert_close(model(input_ids=IDS).logits, plain)
    with reg.interpolate(1.0):
        assert torch.equal(model(input_ids=IDS).logits, moved)
    model.train()
    loss, terms = reg.loss(lambda: model(input_ids=IDS), lambda out: out.logits.square().mean())
    loss.backward()
    assert terms["anchor_kl"] > 0
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora" in n)


@pytest.mark.parametrize(
    "trained",
    [
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["classifier"]},
        {"lora_alpha": 8},
    ],
    ids=lambda t: next(iter(t)) + str(next(iter(t.values()))),
)
def test_with_lora_what_is_trained_beside_the_adapters_goes_back_too(trained, monkeypatch):
    """Contract: whatever is trained, the start is the model of before, and frozen weights are
    neither kept nor copied."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], **trained)
    model = peft.get_peft_model(bert(), config).eval()
    for name, p in model.named_parameters():
        if "LayerNorm" in name:
            p.requires_grad_(True)
    start = model(input_ids=IDS).logits.detach()
    reg = regularize(model, AnchorKL(1.0))
    move(model, by=0.5)
    now = model(input_ids=IDS).logits.detach()
    assert not torch.allclose(now, start)
    copied = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda t: copied.append(t.shape) or clone(t))
    with torch.no_grad(), reg.at_start():
        monkeypatch.undo()
        torch.testing.assert_close(model(input_ids=IDS).logits, start)
    moved = [p for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert len(reg.start.weights) == len(moved)
    assert len(copied) <= len(moved) + len(list(model.buffers()))
    for alpha, expected in ((0.0, start), (1.0, now)):
        with torch.no_grad(), reg.interpolate(alpha):
            torch.testing.assert_close(model(input_ids=IDS).logits, expected)
    assert torch.equal(model(input_ids=IDS).logits, now)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_interpolation_lies_between_start_and_now(alpha):
    model = bert()
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    reg = regularize(model, DropKey(0.1), keep_start=True)
    move(model)
    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    with reg.interpolate(alpha):
        for n, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), (1 - alpha) * start[n] + alpha * now[n])
    assert all(torch.equal(p, now[n]) for n, p in model.named_parameters())


def test_a_resumed_run_starts_from_the_same_weights():
    model = vit()
    reg = regularize(model, AnchorKL(1.0))
    move(model)
    saved = copy.deepcopy((model.state_dict(), reg.state_dict()))
    other = vit()
    other.load_state_dict(saved[0])
    again = regularize(other, AnchorKL(1.0))
    again.load_state_dict(saved[1])
    terms = [r.loss(lambda m=r.model: m(X), lambda out: out.sum())[1] for r in (reg, again)]
    assert terms[0]["anchor_kl"] > 0
    assert torch.equal(terms[0]["anchor_kl"], terms[1]["anchor_kl"])


def test_errors():
    reg = regularize(vit(), DropKey(0.1))
    with pytest.raises(RuntimeError, match="keep_start=True"), reg.interpolate(0.5):
        pass
    reg = regularize(vit(), DropKey(0.1), keep_start=True)
    with pytest.raises(ValueError, match=r"alpha in \[0, 1\], got 2"), reg.interpolate(2):
        pass
