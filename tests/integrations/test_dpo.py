"""TRL's DPO trainer against a loop written by hand that uses nothing of TRL but its batches; its reference is plain."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey
from dampen.integrations import hf
from tests.full import product
from tests.integrations.hf_loop import logged
from tests.integrations.tiny import METHODS, llama, same, weights
from tests.integrations.trl_data import arguments, loop, plain_sgd, tokenizer, words

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of the libraries; ours are errors that raise
RANDOM = ("stochastic", "two_pass")


def dpo(folder, model, accumulation, reference=True, **options):
    from datasets import Dataset

    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "prompt": words(3, generator),
            "chosen": " " + words(3, generator),
            "rejected": " " + words(4, generator),
        }
        for _ in range(32)
    ]
    return trl.DPOTrainer(
        model=model, ref_model=llama() if reference else None, processing_class=tokenizer(),
        args=arguments(trl.DPOConfig, folder, accumulation, **options), train_dataset=Dataset.from_list(rows),
        **plain_sgd(model),
    )  # fmt: skip


def installed(trainer, kind):
    methods = METHODS[kind]()
    return (
        trainer
        if methods is None
        else hf.install(trainer, dampen.regularize(trainer.model, methods))
    )


def log_probability(out, inputs):
    """Of each completion."""
    logp = (
        out.logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    )
    return (logp * inputs["completion_mask"][:, 1:]).sum(1)


def by_hand(model, kind, batches, accumulation, beta=0.1):
    """-log sigmoid(beta (policy's margin - reference's margin)), the reference as it was at the start."""
    methods, reference = METHODS[kind](), llama().eval()
    reg = None if methods is None else dampen.regularize(model, methods)
    if reg is not None:
        reg.prefix.doubled.why = (
            "TRL gives the model more than its batch"  # two passes, which draw in another order
        )

    def micro_loss(inputs, micro):
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        with torch.no_grad():
            before = log_probability(reference(**given), inputs)

        def task(out):
            chosen, rejected = (log_probability(out, inputs) - before).chunk(2)
            return -F.logsigmoid(beta * (chosen - rejected)).mean()

        if reg is None:
            return task(model(**given)) / accumulation
        valid = F.pad(inputs["completion_mask"][:, 1:], (0, 1)).bool()
        return reg.loss(lambda: model(**given), task, valid=valid)[0] / accumulation

    return loop(model, reg, batches, accumulation, micro_loss)


@pytest.mark.parametrize(("kind", "accumulation"), product(METHODS, [1, 4]))
def test_dpo_equals_a_loop_by_hand_also_when_resumed(tmp_path, kind, accumulation):
    options = {"disable_dropout": False} if kind in RANDOM else {}
    model, twin, again = llama(), llama(), llama()
    trainer = installed(dpo(tmp_path, model, accumulation, **options), kind)
    batches = list(trainer.get_train_dataloader())
    trainer.train()
    losses = by_hand(twin, kind, batches, accumulation)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    same(weights(model), weights(twin), tolerance=1e-6)
    resumed = installed(dpo(tmp_path / "again", again, accumulation, **options), kind)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed)[-2:] == logged(trainer)[-2:]
    same(weights(again), weights(model))


def test_dpo_wants_no_noise_unless_it_is_said(tmp_path):
    model = llama()
    reg = dampen.regularize(model, DropKey(0.3))
    with pytest.raises(ValueError, match="disable_dropout=True"):
        hf.install(dpo(tmp_path, model, 1), reg)
    hf.install(dpo(tmp_path, model, 1, disable_dropout=False), reg)


def test_dpo_reference_pass_of_an_adapter_is_plain(tmp_path):
    """Policy and reference are one model in training mode there; random methods act in passes with gradient alone."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    reg = dampen.regularize(model, DropKey(0.4), target_modules="*")
    trainer = hf.install(
        dpo(tmp_path, model, 1, reference=False, disable_dropout=False, max_steps=2), reg
    )
    seen = []
    for layer in reg.clones:
        original = layer.mask
        object.__setattr__(
            layer, "native_hiding", lambda keys: None
        )  # a native kernel would not ask for the mask
        object.__setattr__(
            layer, "mask", lambda *a, f=original: (seen.append(torch.is_grad_enabled()), f(*a))[1]
        )
    trainer.train()
    assert seen
    assert all(seen)
