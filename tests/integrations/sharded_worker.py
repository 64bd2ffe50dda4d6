"""One process of a sharded training in two; run by test_sharded.py, all kinds of methods in one launch.

python -m torch.distributed.run --nproc_per_node=2 tests/integrations/sharded_worker.py WAY FILE KIND...

Both ranks see the same batch and draw the same numbers, so the mean of their gradients is the gradient of one process:
whatever the method, losses and weights must be those of a loop without any sharding.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

import dampen
from dampen import DropKey, ExplicitDropout, ExplicitMixout, HiddenDropout, Mixout, NEFTune, RDrop

STEPS = 3
KINDS = {
    "plain": lambda: None,
    "stochastic": lambda: [
        DropKey(dampen.linear(0.4, 0.1, along="progress")),
        HiddenDropout(0.1),
        NEFTune(5.0),
    ],
    "penalty": lambda: [ExplicitDropout(value=3.0, ffn=dampen.linear(5.0, 1.0, along="progress"))],
    "exact": lambda: [ExplicitDropout(value=3.0, ffn=2.0, form="exact")],
    "query_key": lambda: [ExplicitDropout(query=1.0, key=1.0, query_key=1.0, form="exact")],
    "two_pass": lambda: [DropKey(0.3), RDrop(2.0)],
    "two_pass_penalty": lambda: [
        DropKey(0.3),
        RDrop(2.0),
        ExplicitDropout(value=3.0, form="exact"),
    ],
    "mixout": lambda: [Mixout(0.7)],
    "explicit_mixout": lambda: [ExplicitMixout(5.0)],
}


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    ).train()


def batches():
    """Synthetic: 4 images a step."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 3) for _ in range(STEPS)
    ]


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def train(model, reg, step_of):
    """The losses; `step_of(loss)` does the backward and the optimizer's step."""
    losses = []
    for step, (x, y) in enumerate(batches()):
        torch.manual_seed(10 + step)
        if reg is None:
            loss = F.cross_entropy(model(x), y)
        else:
            reg.progress(step / STEPS)
            loss, _ = reg.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y))
        step_of(loss)
        losses.append(loss.item())
    return losses


def by_hand(kind):
    """One process, nothing sharded; two passes and no doubled batch, as in several processes, which draw so."""
    model, methods = vit(), KINDS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    if reg is not None:
        reg.prefix.doubled.why = "several processes do not double"
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    losses = train(model, reg, stepper(optimizer))
    return {"losses": losses, "weights": model.state_dict()}


def stepper(optimizer):
    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp1(model, reg):
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrap = functools.partial(
        FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")
    )
    sharded = wrap(model, auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}))
    losses = train(sharded, reg, stepper(torch.optim.SGD(trained(sharded), lr=0.1)))
    with FullyShardedDataParallel.summon_full_params(sharded):
        clean = {
            n.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
            for n, p in sharded.named_parameters()
        }
    return losses, {n: p for n, p in clean.items() if "dampen_" not in n}, held_here(reg)


def fsdp2(model, reg):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    losses = train(model, reg, stepper(torch.optim.SGD(trained(model), lr=0.1)))
    return losses, {n: p.full_tensor() for n, p in model.state_dict().items()}, held_here(reg)


def held_here(reg):
    """Of each starting weight: how many numbers this process keeps, and how many it has."""
    starts = (
        [] if reg is None else [s for c in reg.clones for s in getattr(c, "starts", {}).items()]
    )
    return {n: (s.value.numel(), s.shape.numel()) for n, s in starts}


def reads_weights(reg):
    return reg is not None and any(
        isinstance(m, ExplicitDropout | ExplicitMixout | Mixout) for m in reg.methods
    )


def zero(stage, leaves=True):
    """DeepSpeed's engine; its own backward and step."""

    def run(model, reg):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        if (
            stage == 3 and leaves and reg is not None and reads_weights(reg)
        ):  # a block's weights stay whole until its forward ends
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

        def step(loss):
            engine.backward(loss)
            engine.step()

        losses = train(engine, reg, step)
        names = {n: p for n, p in model.named_parameters() if "dampen_" not in n}
        with deepspeed.zero.GatheredParameters(list(names.values()), enabled=stage == 3):
            weights = {n: p.detach().clone() for n, p in names.items()}
        engine.destroy()
        return losses, weights, held_here(reg)

    return run


def shares(sizes):
    """Of each starting weight: how many numbers all ranks hold together, and how many it has."""
    held = {}
    for name, (here, whole) in sizes.items():
        count = torch.tensor(here)
        dist.all_reduce(count)
        held[name] = (count.item(), whole)
    return held


WAYS = {
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3_no_leaves": zero(3, leaves=False),
}


def main(way, file, *kinds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for kind in kinds:
        model, methods = vit(), KINDS[kind]()
        reg = None if methods is None else dampen.regularize(model, methods)
        try:
            losses, weights, sizes = WAYS[way](model, reg)
            found[kind] = {"losses": losses, "weights": weights, "shares": shares(sizes)}
        except Exception as error:  # said for each kind, so that one does not hide the others
            found[kind] = {"error": f"{type(error).__name__}: {error}"}
    if dist.get_rank() == 0:
        torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
