"""The trainers give their optimizer to the methods that follow its steps."""

import copy

import lightning
import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dampen
from dampen import WeightAverage, WeightDecay
from dampen.integrations import accelerate, hf
from dampen.integrations.lightning import Regularize, setup
from tests.integrations.hf_loop import arguments
from tests.integrations.test_lightning import Task, images, pytestmark, vit
from tests.integrations.tiny import bert, sentences

pytestmark = [
    *pytestmark,
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


def regularized(model):
    """The handle, and the average, which counts the steps."""
    reg = dampen.regularize(model, [WeightDecay(0.5), WeightAverage()])
    return reg, next(c for c in reg.clones if c.name == "weight_average")


def test_transformers(tmp_path):
    from transformers import Trainer

    model = bert()
    reg, average = regularized(model)
    trainer = Trainer(
        model=model, args=arguments(tmp_path, accumulation=2), train_dataset=sentences(32)
    )
    hf.install(trainer, reg)
    trainer.train()
    assert average.count == trainer.state.global_step > 0


def test_lightning(tmp_path):
    model = vit()
    reg, average = regularized(model)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=tmp_path,
        enable_model_summary=False,
        callbacks=[Regularize(reg)],
        **options,
    )
    trainer.fit(Task(model), DataLoader(images(), batch_size=8))
    assert average.count == trainer.global_step == 8


def test_transformers_resumes(tmp_path):
    from transformers import Trainer

    counts = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        steps = 2 if checkpoint is None else 4
        reg, average = regularized(bert())
        args = arguments(tmp_path, steps=steps, save_strategy="steps", save_steps=2)
        trainer = Trainer(model=reg.model, args=args, train_dataset=sentences(32))
        hf.install(trainer, reg)
        trainer.train(resume_from_checkpoint=checkpoint)
        counts.append(average.count)
    assert counts == [2, 4]


def test_lightning_resumes(tmp_path):
    counts, checkpoint = [], None
    for epochs in (1, 2):
        reg, average = regularized(vit())
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            default_root_dir=tmp_path,
            enable_model_summary=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
            callbacks=[Regularize(reg)],
        )
        loader = DataLoader(images(), batch_size=8)
        trainer.fit(Task(reg.model), loader, ckpt_path=checkpoint)
        checkpoint = str(tmp_path / "one.ckpt")
        trainer.save_checkpoint(checkpoint)
        counts.append(average.count)
    assert counts == [4, 8]


def loop(reg, optimizer, model, backward):
    batch = DataLoader(images(8), batch_size=8)
    for x, y in batch:
        loss, _ = reg.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y))
        backward(loss)
        optimizer.step()


def test_accelerate_and_fabric_as_a_loop_by_hand():
    models = [vit() for _ in range(3)]
    regs = [regularized(m)[0] for m in models]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    regs[0].attach_optimizer(optimizers[0])
    loop(regs[0], optimizers[0], models[0], lambda loss: loss.backward())

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(models[1], optimizers[1])
    accelerate.install(accelerator, regs[1])
    loop(regs[1], optimizer, wrapped, accelerator.backward)

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = setup(fabric, regs[2], optimizers[2])
    loop(regs[2], optimizer, wrapped, fabric.backward)

    expected = copy.deepcopy(models[0].head.weight)
    for model in models[1:]:
        torch.testing.assert_close(model.head.weight, expected)
