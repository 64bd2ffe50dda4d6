"""Lightning's Trainer and Fabric against a loop written by hand."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dampen
from dampen import DropKey, ExplicitDropout, HardMasking, RDrop
from dampen.integrations.lightning import Regularize, setup
from tests.integrations.tiny import METHODS, same, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
]
RATE = 0.1
KINDS = {**METHODS, "learned": lambda: [HardMasking(0.3, learn="rate")]}


def vit(seed=0):
    torch.manual_seed(seed)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    )


def images(count=32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 8, 8, generator=generator), i % 3) for i in range(count)]


class Task(lightning.LightningModule):
    """A module as users write it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Seeded(Callback):
    """The same draws as in the loop by hand, and the losses of each micro-batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_start(self, trainer, pl_module, batch, index):
        torch.manual_seed(100 + index)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
        self.losses.append(outputs["loss"].item())


class Loader(DataLoader):
    """Batches in order, from where it was when a checkpoint was made: with a loader that has no state Lightning begins
    again at the first batch, and says so."""

    done = 0

    def __iter__(self):
        batches, start = list(super().__iter__()), self.done % len(self)
        for i, batch in enumerate(batches[start:], start):
            self.done = i + 1
            yield batch

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def train(model, reg, data, accumulation, folder, ckpt=None, callbacks=(), **options):
    task, seeded = Task(model), Seeded()
    added = [] if reg is None else [Regularize(reg)]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=accumulation, default_root_dir=folder, callbacks=[seeded, *added, *callbacks],
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(task, Loader(data, batch_size=2), ckpt_path=ckpt)
    return trainer, seeded.losses


def bare(model, reg, data, accumulation):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    losses, batches = (
        [],
        [next(iter(DataLoader(data[i : i + 2], batch_size=2))) for i in range(0, len(data), 2)],
    )
    steps = len(batches) // accumulation
    for index, (x, y) in enumerate(batches):
        torch.manual_seed(100 + index)
        if reg is None:
            loss = F.cross_entropy(model(x), y)
        else:
            reg.progress(index // accumulation / steps)
            loss, _ = reg.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y))
        (loss / accumulation).backward()
        losses.append(loss.item() / accumulation)
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def regularized(model, kind):
    methods = KINDS[kind]()
    return None if methods is None else dampen.regularize(model, methods)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
def test_same_losses_and_weights_as_a_loop_by_hand(tmp_path, kind, accumulation):
    model, twin, data = vit(), vit(), images()
    _, losses = train(model, regularized(model, kind), data, accumulation, tmp_path)
    expected = bare(twin, regularized(twin, kind), data, accumulation)
    scale = (
        losses[0] / expected[0]
    )  # Lightning reports a micro-batch's loss before or after dividing it
    assert [v / scale for v in losses] == pytest.approx(expected, rel=1e-6)
    assert min(abs(scale - s) for s in (1.0, accumulation)) < 1e-6
    same(weights(model), weights(twin))


def test_terms_are_logged_and_the_module_is_given_back(tmp_path):
    model = vit()
    reg = dampen.regularize(model, [DropKey(0.3), ExplicitDropout(value=3.0), RDrop(1.0)])
    trainer, _ = train(model, reg, images(), 2, tmp_path)
    found = trainer.logged_metrics | trainer.callback_metrics
    assert {"dampen/task", "dampen/explicit_dropout.value", "dampen/r_drop"} <= set(found)
    assert found["dampen/r_drop"] > 0
    assert "training_step" not in vars(trainer.lightning_module)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_in_the_middle_equals_a_loop_by_hand(tmp_path, kind, accumulation):
    """Stopped after 8 of 16 micro-batches and resumed from other weights: the loop never stopped."""
    twin, results, half = vit(), [], tmp_path / f"step={8 // accumulation}.ckpt"
    expected = bare(twin, hand := regularized(twin, kind), images(), accumulation)
    for resume in (False, True):
        model = vit(seed=5 if resume else 0)
        reg = regularized(model, kind)
        keep = ModelCheckpoint(
            tmp_path, filename="{step}", every_n_train_steps=8 // accumulation, save_top_k=-1,
            save_on_train_epoch_end=False,
        )  # fmt: skip
        _, losses = train(
            model, reg, images(), accumulation, tmp_path, ckpt=str(half) if resume else None,
            callbacks=[] if resume else [keep], enable_checkpointing=not resume,
        )  # fmt: skip
        same(weights(model), weights(twin))
        if reg is not None:
            same(reg.state_dict()["parameters"], hand.state_dict()["parameters"])
        results.append(losses)
    assert results[1] == results[0][8:]
    scale = results[0][0] / expected[0]  # as above
    assert [v / scale for v in results[1]] == pytest.approx(expected[8:], rel=1e-6)


def test_what_cannot_work_is_refused(tmp_path):
    reg = dampen.regularize(vit(), DropKey(0.1))
    with pytest.raises(ValueError, match="does not hold the model"):
        train(vit(), reg, images(4), 1, tmp_path)
    model = vit()
    task = Task(model)
    task.automatic_optimization = False
    callback = Regularize(dampen.regularize(model, DropKey(0.1)))
    with pytest.raises(ValueError, match="automatic_optimization=False"):
        callback.setup(None, task, "fit")
    reg = dampen.regularize(model := vit(), DropKey(0.1))
    with pytest.raises(RuntimeError, match="more than one stateful callback"):  # Lightning's own
        train(model, reg, images(4), 1, tmp_path, callbacks=[Regularize(reg)])


def test_a_fit_that_raised_leaves_nothing_to_the_next(tmp_path):
    """Its training_step is still on the module; the next fit regularizes by its own handle, and only once."""

    class Fails(Callback):
        def on_train_batch_end(self, *args):
            raise ArithmeticError("as a loss that became NaN")

    model, twin = vit(), vit()
    task, calls = Task(model), []
    options = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    first = regularized(model, "penalty")
    with pytest.raises(ArithmeticError):
        lightning.Trainer(**options, callbacks=[Regularize(first), Fails()]).fit(
            task, DataLoader(images()[:2], batch_size=2)
        )
    first.remove()
    model.load_state_dict(twin.state_dict())
    reg = regularized(model, "two_pass")
    model.register_forward_hook(lambda *a: calls.append(1))
    lightning.Trainer(**options, callbacks=[Seeded(), Regularize(reg)]).fit(
        task, DataLoader(images(), batch_size=2)
    )
    assert len(calls) == 2 * 16
    bare(twin, regularized(twin, "two_pass"), images(), 1)
    same(weights(model), weights(twin))
    assert "training_step" not in vars(task)


def by_fabric(folder, kind, accumulation, resume):
    """The loop of a user of Fabric; it saves after 8 of 16 micro-batches, or starts there from other weights."""
    model, data = vit(seed=5 if resume else 0), images()
    reg = regularized(model, kind)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    wrapped, optimizer = (
        fabric.setup(model, optimizer) if reg is None else setup(fabric, reg, optimizer)
    )
    state, losses = (
        {"model": wrapped, "optimizer": optimizer, "reg": {} if reg is None else reg.state_dict()},
        [],
    )
    if resume:
        fabric.load(folder / "half.ckpt", state)
        if reg is not None:
            reg.load_state_dict(state["reg"])
    for index in range(8 if resume else 0, 16):
        if index == 8 and not resume:
            fabric.save(
                folder / "half.ckpt", {**state, "reg": {} if reg is None else reg.state_dict()}
            )
        x, y = next(iter(DataLoader(data[2 * index : 2 * index + 2], batch_size=2)))
        torch.manual_seed(100 + index)
        if reg is None:
            loss = F.cross_entropy(wrapped(x), y)
        else:
            reg.progress(index // accumulation / (16 // accumulation))
            loss, _ = reg.loss(lambda x=x: wrapped(x), lambda out, y=y: F.cross_entropy(out, y))
        fabric.backward(loss / accumulation)
        losses.append(loss.item() / accumulation)
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses, weights(model)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
def test_fabric_equals_a_loop_by_hand_also_when_resumed(tmp_path, kind, accumulation):
    twin = vit()
    expected = bare(twin, regularized(twin, kind), images(), accumulation)
    for resume in (False, True):
        losses, found = by_fabric(tmp_path, kind, accumulation, resume)
        assert losses == expected[8 if resume else 0 :]
        same(found, weights(twin))


class InADict(torch.nn.Module):
    """A model whose output holds its logits under a name of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return {"found": self.inner(x)}


class TaskOfADict(Task):
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.model(x)["found"], y)


def test_logits_says_where_the_predictions_are(tmp_path):
    """Two passes are compared as those of a model that returns a tensor."""
    found = []
    for build, task, logits in (
        (vit, Task, None),
        (lambda: InADict(vit()), TaskOfADict, lambda out: out["found"]),
    ):
        model = build()
        reg = dampen.regularize(model, [DropKey(0.3), RDrop(1.0)])
        seeded = Seeded()
        lightning.Trainer(
            max_steps=3, callbacks=[seeded, Regularize(reg, logits=logits)], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
            enable_model_summary=False, default_root_dir=tmp_path,
        ).fit(task(model), DataLoader(images(), batch_size=4))  # fmt: skip
        found.append(seeded.losses)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    model = InADict(vit())
    reg = dampen.regularize(model, [DropKey(0.3), RDrop(1.0)])
    trainer = lightning.Trainer(
        max_steps=1, callbacks=[Regularize(reg)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"Regularize\(reg, logits="):
        trainer.fit(TaskOfADict(model), DataLoader(images(), batch_size=4))
