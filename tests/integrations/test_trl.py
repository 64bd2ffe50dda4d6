"""TRL's SFT trainer against a loop written by hand that uses nothing of TRL but its batches."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen.integrations import hf
from tests.integrations.hf_loop import logged
from tests.integrations.tiny import METHODS, llama, same, weights
from tests.integrations.trl_data import arguments, loop, plain_sgd, tokenizer, words

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the libraries; ours are errors that raise


def sft(folder, model, accumulation, **options):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    rows = [
        {"prompt": words(3, generator), "completion": " " + words(3 + i % 3, generator)}
        for i in range(32)
    ]
    return trl.SFTTrainer(
        model=model, args=arguments(trl.SFTConfig, folder, accumulation, **options), processing_class=tokenizer(),
        train_dataset=Dataset.from_list(rows), **plain_sgd(model),
    )  # fmt: skip


def installed(trainer, kind):
    methods = METHODS[kind]()
    return (
        trainer
        if methods is None
        else hf.install(trainer, dampen.regularize(trainer.model, methods))
    )


def by_hand(model, kind, batches, accumulation):
    """Cross-entropy of the completion's tokens over all of a step's, penalties averaged over its micro-batches."""
    methods = METHODS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    if reg is not None:
        reg.prefix.doubled.why = (
            "TRL gives the model more than its batch"  # two passes, which draw in another order
        )

    def micro_loss(inputs, micro):
        items = sum((m["labels"][:, 1:] != -100).sum() for m in micro)
        targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}

        def task(out):
            return (
                F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum")
                / items
            )

        if reg is None:
            return task(model(**given))
        _, terms = reg.loss(lambda: model(**given), task, valid=targets != -100)
        return terms.pop("task") + sum(terms.values(), start=torch.zeros(())) / accumulation

    return loop(model, reg, batches, accumulation, micro_loss)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
def test_sft_equals_a_loop_by_hand_also_when_resumed(tmp_path, kind, accumulation):
    """The fused head gives no logits: for two passes they are made of the hidden states."""
    model, twin, again = llama(), llama(), llama(seed=5)
    trainer = installed(sft(tmp_path, model, accumulation), kind)
    batches = list(trainer.get_train_dataloader())
    trainer.train()
    losses = by_hand(twin, kind, batches, accumulation)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)
    resumed = installed(sft(tmp_path / "again", again, accumulation), kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed)[-2:] == logged(trainer)[-2:]
    same(weights(again), weights(model))
    if kind == "two_pass":
        parts = zip(logged(trainer, "dampen/task"), logged(trainer, "dampen/r_drop"), strict=True)
        assert [a + b for a, b in parts] == pytest.approx(logged(trainer), rel=1e-5)


def test_no_forward_is_run_for_outputs_that_nobody_asked_for(tmp_path):
    """TRL computes outputs with a forward of their own; a step with penalties costs one forward, as without."""
    model, calls = llama(), []
    trainer = installed(sft(tmp_path, model, 1, max_steps=2, save_strategy="no"), "penalty")
    model.model.register_forward_hook(lambda *a: calls.append(torch.is_grad_enabled()))
    trainer.train()
    assert calls == [True, True]
