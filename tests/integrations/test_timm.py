"""timm's training script against a loop written by hand: its task, loss, optimizer, scheduler, scaler and checkpoints,
around the two lines of the guide."""

import pytest
import timm
import timm.loss
import timm.optim
import timm.scheduler
import timm.utils
import torch
from torch.nn import functional as F

import dampen
from tests.integrations.tiny import METHODS, same, weights

EPOCHS, BATCHES = 2, 8
UPDATES = {1: 8, 4: 2}


def vit(seed=0):
    torch.manual_seed(seed)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=3,
    ).train()


def loader():
    """Synthetic: 8 batches of 2 images."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 3, 16, 16, generator=generator), torch.arange(2) + i % 2)
        for i in range(BATCHES)
    ]


def forward_with_loss(model, reg, input, target, loss_fn):
    """`_forward` of the script with the guide's line: penalties in one pass, `reg.loss` where two are compared."""
    if reg is None:
        return loss_fn(model(input), target)
    if reg.passes > 1:
        return reg.loss(lambda: model(input), lambda out: loss_fn(out, target))[0]
    return loss_fn(model(input), target) + reg.penalty()


def script(folder, kind, accum_steps, resume):
    """What `train.py` does, with timm's parts; it saves after an epoch, or resumes there from other weights."""
    model, methods = vit(seed=5 if resume else 0), METHODS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    optimizer = timm.optim.create_optimizer_v2(
        model, opt="momentum", lr=0.1, momentum=0.0, weight_decay=0.0
    )
    scheduler, _ = timm.scheduler.create_scheduler_v2(
        optimizer, sched="step", num_epochs=EPOCHS, decay_epochs=1, decay_rate=0.5
    )
    loss_fn = timm.loss.LabelSmoothingCrossEntropy(0.1)
    saver = timm.utils.CheckpointSaver(
        model, optimizer, checkpoint_dir=str(folder), recovery_dir=str(folder)
    )
    start, losses = 0, []
    if resume:
        timm.models.resume_checkpoint(
            model, str(folder / "last.pth.tar"), optimizer, log_info=False
        )
        if reg is not None:
            reg.load_state_dict(torch.load(folder / "dampen.pt", weights_only=True))
        start = 1
        scheduler.step(start)
    for epoch in range(start, EPOCHS):
        for batch_idx, (input, target) in enumerate(loader()):
            need_update = (batch_idx + 1) % accum_steps == 0
            torch.manual_seed(100 * epoch + batch_idx)
            if reg is not None:
                done = epoch * UPDATES[accum_steps] + batch_idx // accum_steps
                reg.progress(done / (EPOCHS * UPDATES[accum_steps]))
            loss = forward_with_loss(model, reg, input, target, loss_fn)
            if accum_steps > 1:
                loss = loss / accum_steps
            loss.backward()
            if need_update:
                timm.utils.dispatch_clip_grad(model.parameters(), value=100.0, mode="norm")
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item() * accum_steps)
        scheduler.step(epoch + 1)
        if not resume and epoch == 0:
            saver.save_checkpoint(epoch)
            if reg is not None:
                torch.save(reg.state_dict(), folder / "dampen.pt")
    return losses, weights(model)


def by_hand(kind, accumulation):
    """Nothing of timm but the model."""
    model, methods = vit(), METHODS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    losses = []
    for epoch in range(EPOCHS):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 0.5**epoch)
        for i, (x, y) in enumerate(loader()):
            torch.manual_seed(100 * epoch + i)
            if reg is None:
                loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            else:
                done = epoch * UPDATES[accumulation] + i // accumulation
                reg.progress(done / (EPOCHS * UPDATES[accumulation]))
                loss, _ = reg.loss(
                    lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y, label_smoothing=0.1)
                )  # fmt: skip
            (loss / accumulation).backward()
            losses.append(loss.item())
            if (i + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    return losses, weights(model)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
def test_the_script_equals_a_loop_by_hand_also_when_resumed(tmp_path, kind, accumulation):
    losses, expected = by_hand(kind, accumulation)
    whole = script(tmp_path, kind, accumulation, resume=False)
    assert whole[0] == pytest.approx(losses, rel=1e-5)
    same(whole[1], expected, tolerance=1e-5)
    resumed = script(tmp_path, kind, accumulation, resume=True)
    assert resumed[0] == whole[0][BATCHES:]
    same(resumed[1], whole[1])


@pytest.mark.parametrize("kind", ["penalty", "two_pass"])
def test_the_task_of_newer_scripts(kind):
    """`task(input, target)` returns its loss: the same two lines around it."""
    tasks = pytest.importorskip("timm.task")
    (input, target), losses = loader()[0], []
    for tasked in (False, True):
        model = vit()
        reg = dampen.regularize(model, METHODS[kind]())
        torch.manual_seed(3)
        if tasked:
            task = tasks.ClassificationTask(
                model, timm.loss.LabelSmoothingCrossEntropy(0.1), verbose=False
            )
            loss, _ = reg.loss(
                lambda: task(input, target),  # noqa: B023
                lambda r: r["loss"],
                logits=lambda r: r["output"],
            )
        else:
            loss, _ = reg.loss(
                lambda: model(input), lambda out: F.cross_entropy(out, target, label_smoothing=0.1)  # noqa: B023
            )  # fmt: skip
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
