"""The contracts, one function each: it raises `ContractBroken` where the regularizer breaks it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dampen._torch import (
    TorchDispatchMode,
    compile_counter,
    inductor_draws_as_eager,
    keep_sizes,
    version_of,
)
from dampen.checking import masked
from dampen.checking.pairs import beside, order
from dampen.checking.subjects import (
    ENCODER,
    SHALLOW,
    SHORT_ENCODER,
    Attached,
    Make,
    Subject,
    plain_logits,
    require,
    same,
    same_gradients,
    subject_for,
    task_loss,
    with_companion,
    with_example,
)
from dampen.handle import regularize
from dampen.regularizer import (
    LOSS_STAGES,
    STAGES,
    STEP_STAGES,
    Regularizer,
    UnsupportedModel,
    needs_matrix,
)
from dampen.schedules import always_zero


def eval_exact(make: Make, subject: Subject) -> None:
    """1. In eval the model computes, to the bit, what it computed before (unless the method acts in
    eval by design).

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    if make().in_eval:
        return
    model, inputs = subject.model().eval(), subject.inputs()
    before = plain_logits(subject, model, inputs)
    regularize(model, with_companion([make()]))
    same(
        plain_logits(subject, model, inputs), before, "eval output with the regularizer and without"
    )


def state_dict(make: Make, subject: Subject) -> None:
    """2. The model's state_dict keeps its keys, and loads strictly both ways.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    plain, trial = subject.model(seed=3), Attached(make, subject)
    require(list(plain.state_dict()) == list(trial.model.state_dict()), "state_dict keys changed")
    trial.model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(trial.model.state_dict(), strict=True)


def identity(make: Make, subject: Subject) -> None:
    """3. At rate 0 and weight 0 nothing happens in training.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject, neutral=True)
    _, terms, logits = trial.step()
    expected = plain_logits(subject, subject.model(), trial.inputs)
    same(logits, expected, "training output at rate 0 and without regularizer", 1e-5)
    for name, value in terms.items():
        require(
            name == "task" or value.item() == 0.0,
            f"the term {name} is {value.item():.3g} at weight 0",
        )


def shapes_and_dtypes(make: Make, subject: Subject) -> None:
    """4. Stages keep shape and dtype, in float32, bfloat16, float16 and under autocast; `tokens`
    may shorten N.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        trial = Attached(make, subject)
        trial.model.to(dtype)
        _watch_stages(trial.reg.clones)
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in trial.inputs.items()}
        _, _, logits = trial.step(cast, backward=dtype is not torch.float16)
        require(logits.dtype == dtype, f"a model in {dtype} gives {logits.dtype}")
    trial = Attached(make, subject)
    _watch_stages(trial.reg.clones)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = trial.step()
    require(torch.isfinite(loss), "the loss under autocast is not finite")


def gradients_finite(make: Make, subject: Subject) -> None:
    """5. Loss and gradients are finite, and the penalties have a gradient.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    check_finite(trial)


def check_finite(trial: Attached) -> None:
    """Loss, terms and gradients of one step are finite, and some gradient is there.

    Args:
        trial: a model with regularizers attached.
    """
    loss, terms, _ = trial.step()
    for name, value in {"loss": loss, **terms}.items():
        require(torch.isfinite(value).all(), f"{name} is {value.item()}")
    gradients = trial.gradients()
    require(bool(gradients), "no parameter got a gradient")
    for name, gradient in gradients.items():
        require(torch.isfinite(gradient).all(), f"the gradient of {name} is not finite")


def copies(make: Make, subject: Subject) -> None:
    """6. A deepcopy is independent and equal; pickle goes there and back.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    # leaves a graph in the slots, which a copy must not meet
    trial.step()
    twin = trial.copy()
    first, second = trial.step()[0], twin.step()[0]
    same(first, second, "the loss of a model and of its deepcopy")
    require(
        not {id(c) for c in trial.reg.clones} & {id(c) for c in twin.reg.clones},
        "the copy shares its regularizers",
    )
    twin.reg.progress(1.0)
    same(trial.step()[0], first, "the loss after the copy has moved on")
    revived = pickle.loads(pickle.dumps(trial.model))
    torch.manual_seed(2)
    out = subject.logits(revived(**trial.inputs)).detach()
    same(out, trial.step()[2], "the output of a model and of its pickle")


def compiled(make: Make, subject: Subject, backend: str = "eager") -> None:
    """7. torch.compile(fullgraph=True) gives the same loss and gradients, with one graph over a
    whole schedule.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
        backend: of torch.compile.
    """
    torch.compiler.reset()
    trial = Attached(make, subject)
    counter: Any = compile_counter(backend)
    run = torch.compile(trial.model, fullgraph=True, backend=counter)
    graphs = None
    for progress in (0.0, 0.3, 0.6, 1.0):
        trial.reg.progress(progress)
        eager_loss, eager = trial.step()[0], trial.gradients()
        loss = trial.step(run=run)[0]
        same(loss, eager_loss, f"the loss compiled and eager at progress {progress}", 1e-4)
        same_gradients(trial.gradients(), eager, f"compiled and eager at progress {progress}", 1e-4)
        graphs = counter.frame_count if graphs is None else graphs
        require(
            counter.frame_count == graphs,
            f"{counter.frame_count} graphs instead of {graphs} at progress {progress}",
        )
    torch.compiler.reset()


def compiled_dynamic(
    make: Make,
    subject: Subject,
    backend: str = "eager",
    lengths: Sequence[int] = (10, 18, 27, 37),
) -> None:
    """7, with open sizes: torch.compile(fullgraph=True, dynamic=True) makes one graph for four
    batches of different sizes, with the loss and the gradients of plain calls. On sequences of four
    lengths, in an encoder of its own, whatever the subject; a method that refuses it is given four
    numbers of images."""
    torch.compiler.reset()
    try:
        trial = Attached(make, shallow(make, subject_for(make, ENCODER)))
        batches = [_sequences(n, 2 + i) for i, n in enumerate(lengths)]
    except UnsupportedModel:
        trial = Attached(make, subject_for(make, SHALLOW))
        batches = [
            {"images": trial.inputs["images"].repeat(2 + i, 1, 1, 1)} for i in range(len(lengths))
        ]
        for batch in batches:
            keep_sizes(batch["images"], (1, 2, 3))
    counter: Any = compile_counter(backend)
    run = torch.compile(trial.model, fullgraph=True, dynamic=True, backend=counter)
    graphs = None
    for batch in batches:
        sizes = [tuple(v.shape) for v in batch.values()]
        eager_loss, eager = trial.step(batch)[0], trial.gradients()
        loss = trial.step(batch, run=run)[0]
        where = f"compiled with open sizes and plain at {sizes}"
        same(loss, eager_loss, f"the loss {where}", 1e-4)
        same_gradients(trial.gradients(), eager, where, 1e-4)
        graphs = counter.frame_count if graphs is None else graphs
        found = counter.frame_count
        require(found == graphs, f"{found} graphs instead of {graphs} at {sizes}")
    torch.compiler.reset()


def _sequences(tokens: int, samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {"x": torch.randn(samples, tokens, 6, generator=generator)}


def shallow(make: Make, subject: Subject) -> Subject:
    """One layer of an own model instead of several, which compiles faster; unless nothing of the
    method is left there, as of DropPath, whose default is 0 in the first layer.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    schedules = with_example(make)().schedules.values()
    left_out = bool(schedules) and all(always_zero(s, 0.0) for s in schedules)
    if left_out:
        return subject
    short = {"vit": SHALLOW, "encoder": SHORT_ENCODER}.get(subject.name, subject)
    return subject_for(make, short)


def compiled_inductor(make: Make, subject: Subject) -> None:
    """7, once with the real compiler: inductor gives the same loss and gradients.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    with inductor_draws_as_eager():
        compiled(make, shallow(make, subject), "inductor")


def checkpointed(make: Make, subject: Subject) -> None:
    """8. Under activation checkpointing loss and gradients are the same: the same draws, each
    penalty once.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    loss, gradients = trial.step()[0], trial.gradients()
    for layer in trial.reg.layers:
        block = trial.model.get_submodule(layer.site.name)
        object.__setattr__(
            block, "forward", functools.partial(checkpoint, block.forward, use_reentrant=False)
        )
    same(trial.step()[0], loss, "the loss with checkpointing and without", 1e-6)
    same_gradients(trial.gradients(), gradients, "with checkpointing and without")


def seeded(make: Make, subject: Subject) -> None:
    """9. The same seed gives the same result.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    first, gradients = trial.step()[0], trial.gradients()
    same(trial.step()[0], first, "two steps with one seed")
    same_gradients(trial.gradients(), gradients, "two steps with one seed", 1e-7)


def no_leak(make: Make, subject: Subject) -> None:
    """10. What the model's masks hide stays hidden: changing it changes no visible output; padding
    moves no penalty.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    check_leak(Attached(make, subject))


def check_leak(trial: Attached) -> None:
    subject = trial.subject
    if subject.hide is None:
        return
    other, kept = subject.hide(trial.inputs)
    _, terms, logits = trial.step(backward=False)
    _, moved, changed = trial.step(other, backward=False)
    if logits.shape[:2] == kept.shape:
        same(changed[kept], logits[kept], "outputs after changing what must not be seen", 1e-6)
    if subject.padded:
        for name in terms.keys() - {"task"}:
            same(moved[name], terms[name], f"the term {name} after changing padded tokens", 1e-6)


def mask_forms(make: Make, subject: Subject) -> None:
    """16. A key hidden by a bool mask, -inf, -1e9, -1e4, -100 or the smallest number is hidden: the
    same results in SDPA, in the model's own softmax and in nn.MultiheadAttention, and nothing of it
    seen. On a language model of its own, whatever the subject; a method that refuses text keeps it.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    try:
        masked.check_forms([make])
    except UnsupportedModel:
        return


def remove(make: Make, subject: Subject) -> None:
    """11. remove() gives the model back exactly: classes, attributes, modules, results.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    plain, trial = subject.model(), Attached(make, subject)
    trial.step()
    trial.reg.remove()
    for (name, a), (other, b) in zip(
        plain.named_modules(), trial.model.named_modules(), strict=True
    ):
        require(
            name == other and type(a) is type(b),
            f"'{other}' is a {type(b)} after remove(), '{name}' was a {type(a)}",
        )
        require(
            vars(a).keys() == vars(b).keys(),
            f"'{name}' keeps {sorted(vars(b).keys() ^ vars(a).keys())}",
        )
    trial.model.zero_grad()
    same(
        plain_logits(subject, trial.model, trial.inputs),
        plain_logits(subject, plain, trial.inputs),
        "after remove()",
    )


def documented(make: Make, subject: Subject) -> None:
    """12. Constructible by default; the docstring says what it does, and of ours it names the paper
    and an example.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    cls = type(make())
    doc = cls.__doc__ or ""
    require(bool(doc.strip().splitlines()[:1]), f"{cls.__name__} has no docstring")
    if not cls.__module__.startswith("dampen."):
        # a method of one's own may have no paper
        return
    require(
        "arXiv" in doc or "et al." in doc,
        f"the docstring of {cls.__name__} names no paper (arXiv id, or authors et al.)",
    )
    require(">>>" in doc, f"the docstring of {cls.__name__} has no runnable example")


def optimizer_steps(make: Make, subject: Subject) -> None:
    """18. A method that acts in the steps of the optimizer does nothing at rate 0, does not touch
    parameters without gradient, and leaves the optimizer alone after remove().

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    if not make().stages & set(STEP_STAGES):
        return
    trial, plain = Attached(make, subject, neutral=True), Attached(make, subject)
    plain.reg.remove()
    for run in (plain, trial):
        first = next(run.model.parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(run.model.parameters(), weight_decay=0.0)
        if run is trial:
            run.reg.attach_optimizer(optimizer)
        for seed in (2, 3):
            run.model.zero_grad(set_to_none=True)
            torch.manual_seed(seed)
            task_loss(subject.logits(run.model(**run.inputs))).backward()
            before = first.clone()
            optimizer.step()
            same(first, before, "a frozen parameter after a step and before")
    pairs = zip(trial.model.named_parameters(), plain.model.parameters(), strict=True)
    for (name, a), b in pairs:
        same(a, b, f"{name} after two steps at rate 0 and without the method")
    trial.reg.remove()
    left = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
    require(not left, "the optimizer keeps hooks after remove()")


def kernel(make: Make, subject: Subject) -> None:
    """14. The kernel that ran is the one declared: fused unless a stage needs the matrix of
    scores.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    calls = _FusedCalls()
    with calls:
        trial.step(backward=False)
    for name, ran in trial.reg.kernels().items():
        declared = "plain" if needs_matrix(trial.reg.clones) else ran.split()[0]
        require(ran.startswith(declared), f"'{name}' says {ran}, declared {declared}")
        require(
            ran.startswith("fused") == bool(calls.names),
            f"'{name}' says {ran}, but the fused calls were {calls.names}",
        )


def exported(make: Make, subject: Subject) -> None:
    """15. torch.export and ONNX work at eval, and give the same.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    trial = Attached(make, subject)
    model = trial.model.eval()
    expected = plain_logits(subject, model, trial.inputs)
    with torch.no_grad():
        program = torch.export.export(model, (), trial.inputs)
        same(
            subject.logits(program.module()(**trial.inputs)),
            expected,
            "the exported program and the model",
            1e-4,
        )


def exported_onnx(make: Make, subject: Subject) -> None:
    """15, ONNX: the file gives what the model gives.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        subject: the model to try it on.
    """
    import onnxruntime

    trial = Attached(make, shallow(make, subject))
    model = trial.model.eval()
    expected = plain_logits(subject, model, trial.inputs)
    program: Any = torch.onnx.export(model, (), kwargs=trial.inputs, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    got = session.run(
        None,
        {
            i.name: v.numpy()
            for i, v in zip(session.get_inputs(), trial.inputs.values(), strict=True)
        },
    )
    same(torch.from_numpy(got[0]), expected, "ONNX and the model", 1e-4)


class _FusedCalls(TorchDispatchMode):
    """Which fused attention kernels were called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def _watch_stages(clones: list[Regularizer]) -> None:
    """Wrap the stages of the clones so that a changed shape or dtype raises."""
    for clone in clones:
        for stage in clone.stages & (set(STAGES) - {"mask", "inputs", *LOSS_STAGES, *STEP_STAGES}):
            object.__setattr__(clone, stage, _watched(clone, stage))


def _watched(clone: nn.Module, stage: str) -> Callable[..., Any]:
    original = getattr(clone, stage)

    def watched(*args: Any) -> Any:
        versions = [version_of(a) for a in args if isinstance(a, torch.Tensor)]
        out = original(*args)
        written = versions != [version_of(a) for a in args if isinstance(a, torch.Tensor)]
        require(
            not written,
            f"{stage} writes into a tensor that it got, which others read: return a new one",
        )
        taken, given = (
            (args[1:2], (out,))
            if stage == "block"
            else (args, out if isinstance(out, tuple) else (out,))
        )
        for before, after in zip(taken, given, strict=False):
            require(after.dtype == before.dtype, f"{stage}: {before.dtype} became {after.dtype}")
            shorter = stage == "tokens" and after.shape[::2] == before.shape[::2]
            require(
                shorter or after.shape == before.shape,
                f"{stage}: {tuple(before.shape)} became {tuple(after.shape)}",
            )
        return out

    return watched


CONTRACTS: dict[str, Callable[[Make, Subject], None]] = {
    f.__name__: f
    for f in (
        eval_exact, state_dict, identity, shapes_and_dtypes, gradients_finite, copies, compiled,
        compiled_dynamic, compiled_inductor, checkpointed, seeded, no_leak, remove, documented,
        kernel, exported, exported_onnx, order, beside, mask_forms, optimizer_steps,
    )
}  # fmt: skip
"""By name; number 13 (two processes equal one) needs a launcher and lives in
`dampen.checking.distributed`."""

ONCE = frozenset(
    {
        "compiled_dynamic", "compiled_inductor", "documented", "exported_onnx", "order", "beside",
        "mask_forms", "optimizer_steps",
    }
)  # fmt: skip
"""Contracts that are run on the first subject only, because they take long or do not depend on the
model."""
