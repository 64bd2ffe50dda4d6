"""attach_to_loss=True: the penalties' gradient on the model's own loss."""

import copy
import pickle

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer

import dampen
from dampen import DropKey, ExplicitDropout, RDrop
from dampen.integrations import hf
from tests.integrations.hf_loop import arguments, logged, make
from tests.integrations.tiny import batch, bert, llama, same, sentences, texts, weights


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("build", [bert, llama])
def test_value_unchanged_to_the_bit_and_gradient_of_the_sum(build):
    inputs = batch((sentences if build is bert else texts)(4))
    plain, model, twin = build().train(), build().train(), build().train()
    reg = dampen.regularize(model, ExplicitDropout(value=3.0, ffn=1.0), attach_to_loss=True)
    other = dampen.regularize(twin, ExplicitDropout(value=3.0, ffn=1.0))
    out = model(**inputs)
    assert torch.equal(out.loss, plain(**inputs).loss)
    assert torch.equal(out["loss"], out.loss)
    out.loss.backward()
    loss, terms = other.loss(lambda: twin(**inputs), lambda out: out.loss)
    loss.backward()
    same(gradients(model), gradients(twin), tolerance=1e-6)
    same(reg.attached, {n: v.detach() for n, v in terms.items() if n != "task"})


def test_what_happens_to_the_loss_happens_to_the_penalties():
    inputs, model, twin = batch(sentences(4)), bert().train(), bert().train()
    dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
    reg = dampen.regularize(twin, ExplicitDropout(value=3.0))
    (model(**inputs, return_dict=False)[0] * 128 / 4).backward()
    (reg.loss(lambda: twin(**inputs), lambda out: out.loss)[0] * 32).backward()
    same(gradients(model), gradients(twin), tolerance=1e-5)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("language", [False, True])
def test_in_the_stock_trainer(tmp_path, accumulation, language):
    """The plain Trainer logs the plain loss and ends where `hf.install` ends."""
    data = sentences(32) if not language else full_texts(32)
    build = llama if language else bert
    model, twin = build(), build()
    dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
    stock = make(model, data, arguments(tmp_path, accumulation), None)
    assert type(stock) is Trainer
    stock.train()
    installed = make(
        twin,
        data,
        arguments(tmp_path, accumulation),
        dampen.regularize(twin, ExplicitDropout(value=3.0)),
    )
    installed.train()
    same(weights(model), weights(twin), tolerance=1e-6)
    assert logged(stock) == pytest.approx(logged(installed, "dampen/task"), rel=1e-5)
    assert isinstance(installed, hf.Regularized)


def full_texts(count):
    """Without padding: every micro-batch has the same number of labels."""
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(1, 30, (6,), generator=generator) for _ in range(count)]
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in rows
    ]


def test_without_a_loss_a_number_says_how_much():
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    model = dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    ).train()
    twin = copy.deepcopy(model)
    reg = dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=0.25)
    other = dampen.regularize(twin, ExplicitDropout(value=3.0))
    F.cross_entropy(model(x), y).backward()
    (F.cross_entropy(twin(x), y) + 0.25 * other.penalty()).backward()
    same(gradients(model), gradients(twin), tolerance=1e-6)
    assert reg.attached["explicit_dropout.value"] > 0


def test_no_loss_and_no_number_is_refused():
    model = bert().train()
    dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
    inputs = batch(sentences(4))
    inputs.pop("labels")
    with pytest.raises(
        RuntimeError, match="returned a SequenceClassifierOutput without one. Call it with labels"
    ):
        model(**inputs)
    assert model.eval()(**inputs).loss is None


def test_two_passes_and_wrong_numbers_are_refused_and_nothing_is_changed():
    model = bert()
    cls = type(model)
    with pytest.raises(ValueError, match="compares two passes"):
        dampen.regularize(model, [DropKey(0.1), RDrop()], attach_to_loss=True)
    with pytest.raises(ValueError, match="positive number"):
        dampen.regularize(model, ExplicitDropout(value=1.0), attach_to_loss=-1.0)
    assert type(model) is cls


def test_inside_reg_loss_they_are_added_once():
    inputs, model, twin = batch(sentences(4)), bert().train(), bert().train()
    reg = dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
    other = dampen.regularize(twin, ExplicitDropout(value=3.0))
    for r, m in ((reg, model), (other, twin)):
        r.loss(lambda m=m: m(**inputs), lambda out: out.loss)[0].backward()
    same(gradients(model), gradients(twin))


def test_copies_pickles_and_removal():
    inputs, model = batch(sentences(4)), bert().train()
    cls = type(model)
    reg = dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
    twin = copy.deepcopy(model)
    revived = pickle.loads(pickle.dumps(model))
    for m in (model, twin, revived):
        m(**inputs).loss.backward()
    same(gradients(model), gradients(twin))
    same(gradients(model), gradients(revived))
    reg.remove()
    assert type(model) is cls


def test_checkpointing_and_compile():
    inputs = batch(full_texts(4))
    results = []
    for mode in ("plain", "checkpointed", "compiled"):
        model = llama().train()
        dampen.regularize(model, ExplicitDropout(value=3.0), attach_to_loss=True)
        if mode == "checkpointed":
            model.activation_checkpointing_enable({"use_reentrant": False})
        run = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
        run(**inputs).loss.backward()
        results.append(gradients(model))
    same(results[0], results[1], tolerance=1e-6)
    same(results[0], results[2], tolerance=1e-5)
