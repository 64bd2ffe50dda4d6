"""Hugging Face's Trainer against a loop written by hand: logged losses and final weights, to the bit."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback

import dampen
from dampen import ExplicitDropout
from dampen.integrations import hf
from tests.integrations.hf_loop import RATE, arguments, bare, logged, make, regularized
from tests.integrations.tiny import METHODS, bert, llama, same, sentences, texts, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("language", [False, True])
def test_same_losses_and_weights_as_a_loop_by_hand(tmp_path, kind, accumulation, language):
    build, data = (llama, texts(32)) if language else (bert, sentences(32))
    model, twin = build(), build()
    trainer = make(model, data, arguments(tmp_path, accumulation), regularized(model, kind))
    trainer.train()
    losses = bare(twin, regularized(twin, kind), data, accumulation, language=language)
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    same(weights(model), weights(twin))


@pytest.mark.parametrize("language", [False, True])
@pytest.mark.parametrize("kind", ["penalty", "two_pass"])
def test_label_smoothing(tmp_path, kind, language):
    build, data = (llama, texts(32)) if language else (bert, sentences(32))
    model, twin = build(), build()
    trainer = make(
        model, data, arguments(tmp_path, 4, label_smoothing_factor=0.2), regularized(model, kind)
    )
    trainer.train()
    losses = bare(twin, regularized(twin, kind), data, 4, smoothing=0.2, language=language)
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    same(weights(model), weights(twin))


def test_bf16(tmp_path):
    model, twin, data = bert(), bert(), sentences(32)
    trainer = make(model, data, arguments(tmp_path, 2, bf16=True), regularized(model, "penalty"))
    trainer.train()
    losses = bare(twin, regularized(twin, "penalty"), data, 2, autocast=True)
    assert logged(trainer) == pytest.approx(losses, rel=1e-2)
    same(weights(model), weights(twin), tolerance=2e-2)


def test_a_loss_function_of_ones_own(tmp_path):
    """`compute_loss_func` gets the whole step's items and is not divided: the penalty is."""

    def own(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    data, runs = texts(32), []
    for given in (own, None):
        model = llama()
        reg = dampen.regularize(model, ExplicitDropout(value=3.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = Trainer(
            model=model, args=arguments(tmp_path, 4), train_dataset=data, compute_loss_func=given,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        )  # fmt: skip
        hf.install(trainer, reg)
        trainer.train()
        runs.append((logged(trainer), weights(model)))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-5)
    same(runs[0][1], runs[1][1], tolerance=1e-5)


def test_a_trainer_class_of_ones_own(tmp_path):
    class MyTrainer(hf.Regularized, Trainer):
        pass

    model, twin, data = bert(), bert(), sentences(32)
    reg = dampen.regularize(model, METHODS["penalty"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = MyTrainer(
        model=model, args=arguments(tmp_path, 4), train_dataset=data, optimizers=(optimizer, schedule),
        regularization=reg,
    )  # fmt: skip
    trainer.train()
    bare(twin, dampen.regularize(twin, METHODS["penalty"]()), data, 4)
    same(weights(model), weights(twin))


class Gradients(TrainerCallback):
    """The gradients of the first step, before they are used."""

    def __init__(self):
        self.found = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.found is None:
            self.found = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }


def gradients(folder, build, data, size, accumulation, value, attached):
    """Of one step over 8 examples, with a penalty of this coefficient."""
    model = build()
    seen = Gradients()
    methods = ExplicitDropout(value=value)
    reg = dampen.regularize(model, methods, attach_to_loss=attached) if value else None
    args = arguments(folder, accumulation, steps=1, per_device_train_batch_size=size)
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[seen])
    if reg is not None and not attached:
        hf.install(trainer, reg)
    trainer.train()
    return seen.found


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("language", [False, True])
def test_accumulation_keeps_the_weight_of_penalties(tmp_path, language, attached):
    """8 examples at once and 4 times 2 give the same gradient of the task and of the penalty."""
    build, data = (llama, texts(8)) if language else (bert, sentences(8))

    def penalty(size, accumulation):
        one, none = (
            gradients(tmp_path, build, data, size, accumulation, value, attached)
            for value in (3.0, 0)
        )
        return torch.cat([(one[n] - none[n]).flatten() for n in one])

    whole, parts = penalty(8, 1), penalty(2, 4)
    assert whole.norm() > 1e-3
    assert (parts @ whole / whole.square().sum()).item() == pytest.approx(1.0, abs=0.15)
