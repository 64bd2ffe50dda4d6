"""Input masking hides whole tokens at its rate, none that is special or padded, and keeps labels."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey, InputMasking, RDrop, regularize
from tests.families import FAMILIES, PADDING
from tests.integrations.tiny import bert, llama


def test_tokens_are_hidden_whole_and_at_the_rate():
    torch.manual_seed(0)
    x = torch.randn(200, 50, 4)
    out = InputMasking(0.3).embeddings(x)
    hidden = (out == 0).all(-1)
    assert torch.equal(out[~hidden], x[~hidden])
    assert hidden.double().mean().item() == pytest.approx(0.3, abs=4 * (0.21 / 10_000) ** 0.5)


def shown(model, method, **inputs):
    """The output of the embedding with the method."""
    seen = []
    reg = regularize(model, method)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    model(**inputs)
    reg.remove()
    return seen[0]


@pytest.mark.parametrize("by", ["config", "several in the config", "argument"])
def test_special_and_padded_tokens_stay(by):
    torch.manual_seed(0)
    model = bert()
    model.config.cls_token_id = 3 if by == "config" else None
    model.config.eos_token_id = [3, 4] if by == "several in the config" else None
    special = [3] if by == "argument" else None
    ids = torch.tensor([[3, 5, 6, 7, 8, 9, 10], [3, 5, 3, 7, 8, 2, 2]])
    out = shown(model, InputMasking(0.999, special=special), input_ids=ids, attention_mask=PADDING)
    kept = (out != 0).any(-1)
    assert kept[ids == 3].all()
    assert kept[PADDING == 0].all()
    assert kept.double().mean() < 0.8


def loss_of(out, labels):
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_two_passes_are_the_plain_loss_and_the_masked_loss():
    """Against two plain forwards, the second with the embeddings that were used."""
    model, ids = llama(), torch.arange(1, 13).view(2, 6) % 11 + 1
    plain = loss_of(model(input_ids=ids), ids)
    reg = regularize(model, InputMasking(0.5, two_pass=True, weight=0.3))
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda m, args, out: seen.append(out.detach())
    )
    loss, terms = reg.loss(lambda: model(input_ids=ids), lambda out: loss_of(out, ids))
    loss.backward()
    ours = model.lm_head.weight.grad.clone()
    hook.remove()
    reg.remove()
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])
    masked = loss_of(model(inputs_embeds=seen[1]), ids)
    torch.testing.assert_close(terms["task"], plain + 0.3 * masked)
    (expected,) = torch.autograd.grad(plain + 0.3 * masked, model.lm_head.weight)
    torch.testing.assert_close(ours, expected)


def test_two_passes_stand_beside_a_comparison_and_need_the_loss():
    model, ids = llama(), torch.arange(1, 13).view(2, 6)
    reg = regularize(model, [InputMasking(0.5, two_pass=True), DropKey(0.2), RDrop(1.0)])
    loss, terms = reg.loss(lambda: model(input_ids=ids), lambda out: loss_of(out, ids))
    assert terms["r_drop"] > 0
    loss.backward()
    reg.remove()
    reg = regularize(model, InputMasking(0.5, two_pass=True))
    model(input_ids=ids)
    with pytest.raises(RuntimeError, match="Let the handle run them"):
        reg.penalty()


def test_eval_is_plain_and_images_lose_patches():
    family = FAMILIES["own_vit"]
    model = family.model()
    plain = model.eval()(**family.inputs)
    reg = regularize(model, InputMasking(0.5))
    assert torch.equal(model(**family.inputs), plain)
    torch.manual_seed(0)
    assert not torch.equal(model.train()(**family.inputs), plain)
    assert "rate=0.5" in repr(reg)
    assert dampen.InputMasking(0.2).per_sample


@pytest.mark.parametrize("other", [dampen.Consistency(passes=3), InputMasking(0.1, two_pass=True)])
@pytest.mark.filterwarnings("ignore:regularize got InputMasking 2 times")
def test_two_passes_beside_another_number_of_passes_are_refused(other):
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    methods = [InputMasking(two_pass=True), other, dampen.DropKey(0.2)]
    for order in (methods, methods[::-1]):
        with pytest.raises(ValueError, match="InputMasking weighs the task losses of its 2 passes"):
            dampen.regularize(model, order)
    reg = dampen.regularize(model, [methods[0], dampen.Consistency(), methods[2]])
    loss, _ = reg.loss(lambda: model(torch.randn(2, 3, 8, 8)), lambda out: out.square().mean())
    loss.backward()
