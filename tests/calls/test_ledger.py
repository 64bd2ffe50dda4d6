"""Penalties are never lost in silence: they wait until they are taken; a backward that goes past them is an error."""

import contextlib
import copy
import functools
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import Consistency, DropHead, DropKey, ExplicitDropout, Regularizer

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Z = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LEFT_OUT = r"(?s)a backward pass ran through the model while its penalties \(value_norm.v\).*reg.penalty\(\).*strict=False"


def vit(depth=2):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, width=8, depth=depth, heads=2, mlp=12
    ).train()


class ValueNorm(Regularizer):
    """A penalty, the mean square of v, for tests."""

    stochastic = False

    def __init__(self, weight=1.0):
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)

    def qkv(self, q, k, v, call):
        self.penalize(self.weight * v.square().mean(), name="v")
        return q, k, v


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_siamese_step_counts_both_forwards():
    """The gradient is that of the task and of both penalties, written out by hand."""
    model = vit()
    reg = dampen.regularize(model, ValueNorm(0.5))
    a, b = model(X), model(Z)
    ((a - b).square().mean() + reg.penalty()).backward()
    got = gradients(model)

    model.zero_grad()
    a = model(X)
    first = reg.penalty()
    b = model(Z)
    second = reg.penalty()
    ((a - b).square().mean() + first + second).backward()
    for name, expected in gradients(model).items():
        torch.testing.assert_close(got[name], expected, msg=name)


def test_eval_forwards_count_nothing():
    model = vit().eval()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)
    with reg.mc_mode():
        model(X)
    assert reg.penalties() == {}


class Both(ValueNorm):
    """A penalty of a method that also acts in `mc_mode`, for tests."""

    stochastic = True


def test_a_penalty_made_in_mc_mode_counts_nothing():
    model = vit().eval()
    reg = dampen.regularize(model, Both(1.0))
    with reg.mc_mode():
        model(X)
    assert reg.penalties() == {}


def step_without_the_penalty(model, run=None):
    F.cross_entropy((model if run is None else run)(X), torch.tensor([0, 1])).backward()


def test_a_backward_past_the_penalties_is_an_error():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    step_without_the_penalty(model)
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        model(X)
    (model(X).mean() + reg.penalty()).backward()  # one who mends the loop goes on
    (model(X).mean() + reg.penalty()).backward()


def test_it_is_an_error_in_reg_loss_too():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    step_without_the_penalty(model)
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        reg.loss(lambda: model(X), lambda out: out.mean())
    loss, _ = reg.loss(lambda: model(X), lambda out: out.mean())
    loss.backward()


def test_taking_them_late_is_taking_them():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X).mean().backward(retain_graph=True)
    reg.penalty().backward()
    model(X)


def test_eval_and_no_grad_forwards_after_it_are_no_training():
    model = vit()
    dampen.regularize(model, ValueNorm(1.0))
    step_without_the_penalty(model)
    with torch.no_grad():
        model(X)
    model.eval()
    model(X)
    model.train()
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        model(X)


def test_those_who_mean_it():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0), strict=False)
    for _ in range(3):
        step_without_the_penalty(model)
    assert reg.penalty() > 0


def test_entry_through_a_submodule_is_watched():
    model = vit()
    dampen.regularize(model, ValueNorm(1.0))
    tokens = torch.randn(2, 5, 8)
    model.blocks[1](tokens).mean().backward()
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        model.blocks[1](tokens)


def test_gradient_accumulation_is_fine():
    model = vit()
    reg = dampen.regularize(model, [ValueNorm(1.0), DropKey(0.1)])
    for _ in range(4):
        (model(X).mean() + reg.penalty()).backward()


def test_frozen_layers_make_no_alarm():
    """Their penalties have no gradient, so nothing is left out."""
    model = vit()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head"))
    dampen.regularize(model, ValueNorm(1.0))
    for _ in range(2):
        step_without_the_penalty(model)


def test_layers_frozen_after_regularize():
    """The watched parameter was frozen meanwhile (as LoRA does): another one is watched."""
    model = vit()
    dampen.regularize(model, ValueNorm(1.0))
    for block in model.blocks:
        block.attn.requires_grad_(False)
        block.mlp.requires_grad_(False)
    step_without_the_penalty(model)
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        model(X)


def checkpointed(model, use_reentrant=False):
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)


def test_checkpointing():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    checkpointed(model)
    for _ in range(2):
        (model(X).mean() + reg.penalty()).backward()
    assert reg.penalties() == {}  # the recompute added nothing
    step_without_the_penalty(model)
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        model(X)


@pytest.mark.parametrize("frozen", [False, True])
def test_reentrant_checkpointing_is_still_found(frozen):
    """It turns gradients off inside the forward: its penalties are lost, not uncounted."""
    model = vit()
    if frozen:  # the tokens carry no gradient then; the blocks do
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith(("blocks", "head", "norm")))
    reg = dampen.regularize(model, ValueNorm(1.0))
    checkpointed(model, use_reentrant=True)
    with pytest.warns(UserWarning, match="requires_grad") if frozen else contextlib.nullcontext():
        model(X)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        reg.penalty()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # dynamo looks at the penalties that wait
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled(fullgraph):
    """The same alarm; one graph over the steps of a loop, and one more for the second forward of a siamese step."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model = vit()
    reg = dampen.regularize(model, ValueNorm(dampen.linear(0.0, 1.0, along="progress")))
    counter = CompileCounter()
    run = torch.compile(model, fullgraph=fullgraph, backend=counter)
    for i in range(4):
        reg.progress(i / 4)
        (run(X).mean() + reg.penalty()).backward()
    assert counter.frame_count == 1
    for _ in range(3):
        a, b = run(X), run(Z)
        both = reg.penalty()
        ((a - b).mean() + both).backward()
    assert counter.frame_count == 2
    model(X), model(Z)
    torch.testing.assert_close(both, reg.penalty())
    step_without_the_penalty(model, run)
    with pytest.raises(Exception, match="a backward pass ran through the model"):
        run(X)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "handle"])
def test_copies_have_a_step_of_their_own(how):
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)  # leaves a live graph, which a copy must not meet
    if how == "handle":
        twin = copy.deepcopy(reg).model
    else:
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    step_without_the_penalty(twin)
    with pytest.raises(RuntimeError, match=LEFT_OUT):
        twin(X)
    (model(X).mean() + reg.penalty()).backward()  # the original is not concerned
    model(X)
    dampen.remove(twin)
    step_without_the_penalty(twin)
    twin(X)


def test_a_copy_of_one_block_does_not_copy_the_model():
    model = vit(depth=4)
    dampen.regularize(model, ValueNorm(1.0))
    size = len(pickle.dumps(model.blocks[0]))
    assert size < 0.5 * len(pickle.dumps(model))
    copy.deepcopy(model.blocks[0])(torch.randn(2, 5, 8))


def test_no_hook_is_left_after_removal():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)
    reg.remove()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_methods_without_penalties_hang_no_hook():
    model = vit()
    dampen.regularize(model, DropKey(0.1))
    step_without_the_penalty(model)
    step_without_the_penalty(model)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_error_ends_the_step():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)
    once = reg.penalty()
    head, model.head = model.head, nn.Linear(3, 3)  # fails at the end
    with pytest.raises(RuntimeError):
        model(X)
    model.head = head
    model(X)
    torch.testing.assert_close(reg.penalty(), once)


def test_penalties_that_wait_before_a_step_of_two_passes():
    """They are counted once, those of the passes are averaged; shared blocks add theirs in both passes."""
    model = vit()
    reg = dampen.regularize(model, [ValueNorm(1.0), DropKey([0.0, 0.3]), Consistency(1.0)])
    with reg.disable():
        model(X)
    assert reg._taken() == {}
    _, terms = reg.loss(lambda: model(X), lambda out: out.mean())
    once = terms["value_norm.v"]
    model(X)
    _, terms = reg.loss(lambda: model(X), lambda out: out.mean())
    torch.testing.assert_close(terms["value_norm.v"], 2 * once)


def test_a_two_pass_method_outside_of_reg_loss():
    model = vit()
    reg = dampen.regularize(model, [DropHead(0.2), Consistency(1.0)])
    model(X)  # a look at the output is no training
    loss, _ = reg.loss(lambda: model(X), lambda out: out.mean())
    loss.backward()
    step_without_the_penalty(model)
    message = r"(?s)Consistency compares two passes, but .*outside reg.loss.*reg.loss\(lambda"
    with pytest.raises(RuntimeError, match=message):
        model(X)
    step_without_the_penalty(model)
    with pytest.raises(RuntimeError, match=message):
        reg.loss(lambda: model(X), lambda out: out.mean())
    reg.loss(lambda: model(X), lambda out: out.mean())[0].backward()
    with reg.disable():
        step_without_the_penalty(model)
        step_without_the_penalty(model)
    reg.loss(lambda: model(X), lambda out: out.mean())[0].backward()


def test_two_passes_outside_for_those_who_mean_it():
    model = vit()
    dampen.regularize(model, [DropHead(0.2), Consistency(1.0)], strict=False)
    step_without_the_penalty(model)
    step_without_the_penalty(model)


def test_threads_do_not_blame_each_other():
    """A backward in one thread while another thread's penalties wait."""
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)  # the main thread's penalties wait
    (parameter,) = {clone.watched[2] for clone in reg.layers[0].clones}
    worker = threading.Thread(target=lambda: parameter.square().sum().backward())
    worker.start()
    worker.join()
    model(X)
    assert reg.penalty() > 0


@pytest.mark.parametrize(
    "method", [ExplicitDropout(), dampen.SkipAblation(), dampen.AroraDropout()]
)
def test_a_method_of_which_nothing_was_asked_is_refused(method):
    model = vit()
    with pytest.raises(ValueError, match=rf"{type(method).__name__}\(\) would do nothing"):
        dampen.regularize(model, method)
    assert type(model) is dampen.models.ViT


def test_lora_after_regularize_is_told_for_what_it_is():
    """Penalties would read the frozen map below; methods that read no weight go on."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["qkv", "fc1"])
    model = vit()
    reg = dampen.regularize(model, ExplicitDropout(value=0.1, ffn=0.1))
    adapted = peft.get_peft_model(model, config).train()
    with pytest.raises(
        RuntimeError, match=r"an adapter \(LoRA\) was put around 'blocks.0.* after regularize"
    ):
        reg.loss(lambda: adapted(X), lambda out: out.mean())
    model = vit()
    reg = dampen.regularize(model, DropKey(0.1))
    adapted = peft.get_peft_model(model, config).train()
    reg.loss(lambda: adapted(X), lambda out: out.mean())[0].backward()
