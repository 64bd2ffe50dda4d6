"""One frame per forward: errors leave nothing behind, threads see their own state only, replicas are refused."""

import copy
import threading

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropKey, DropPath, ExplicitDropout, RDrop
from dampen.regularizer import STAGES, STEP_STAGES, Regularizer, UnsupportedModel
from tests.families import FAMILIES, FEATURES, IMAGES, MEMORY, PADDING, output


class Trap(Regularizer):
    """Raises in one stage while it is armed, and else changes nothing; counts its visits with a penalty before."""

    stochastic = False

    def __init__(self, stage="qkv", armed=True):
        super().__init__()
        self.at_stage, self.armed = stage, armed
        self.stages = frozenset({stage})

    def _meet(self, stage, value):
        if stage == self.at_stage and self.armed:
            raise KeyError(f"trap in {stage}")
        return value

    def inputs(self, x):
        return self._meet("inputs", x)

    def embeddings(self, x, valid=None):
        return self._meet("embeddings", x)

    def tokens(self, x):
        return self._meet("tokens", x)

    def operands(self, x, weight, call):
        return self._meet("operands", (x, weight))

    def product(self, y, call):
        return self._meet("product", y)

    def qkv(self, q, k, v, call):
        return self._meet("qkv", (q, k, v))

    def mask(self, q, k, call):
        return self._meet("mask", None)

    def logits(self, s, call):
        return self._meet("logits", s)

    def probs(self, a, call):
        return self._meet("probs", a)

    def heads(self, o, call):
        return self._meet("heads", o)

    def branch(self, b, call):
        return self._meet("branch", b)

    def block(self, x, y):
        return self._meet("block", y)

    def outputs(self, outputs, valid=None):
        self._meet("outputs", None)


def everything():
    return [DropKey(0.3), DropPath(0.2), ExplicitDropout(query=0.1, value=0.1, ffn=0.1)]


def loss_of(model, reg, inputs):
    torch.manual_seed(3)
    loss, terms = reg.loss(lambda: model(**inputs), lambda out: output(out).float().square().mean())
    return loss, terms


def state_of(layer):
    """What a forward may not leave behind; which kernels ran, which methods were at work, how a block added and what
    ran first stays known."""
    known = "clones ordered kernels work residual_memory residual_same inner_sums order".split()
    return {key: value for key, value in vars(layer).items() if key not in known}


OUTSIDE = (*STEP_STAGES, "task")  # around a step and on a loss: no forward runs them


@pytest.mark.parametrize(
    "name", ["own_vit", "encoder_pre_seq_first", "timm_eva", "timm_swin", "hf_bert", "decoder_post"]
)
@pytest.mark.parametrize("stage", [s for s in STAGES if s not in OUTSIDE])
def test_an_error_in_any_stage_leaves_the_model_as_new(name, stage):
    family = FAMILIES[name]
    model = family.model()
    if stage == "embeddings" and name in (
        "encoder_pre_seq_first",
        "decoder_post",
    ):  # models of features
        with pytest.raises(UnsupportedModel):
            dampen.regularize(model, [*everything(), Trap(stage)])
        return
    reg = dampen.regularize(model, [*everything(), Trap(stage)])
    fresh = copy.deepcopy(reg)
    switches = [getattr(m, "fused_attn", None) for m in model.modules()]
    traps = [c for c in reg.clones if isinstance(c, Trap)]
    for trap in traps[:-1]:
        trap.armed = False  # the last layer: everything before it has run
    with pytest.raises(KeyError, match=f"trap in {stage}"):
        loss_of(model, reg, family.inputs)
    assert [getattr(m, "fused_attn", None) for m in model.modules()] == switches
    for here, there in zip(reg.layers, fresh.layers, strict=True):
        assert state_of(here) == {**state_of(there), "site": here.site}
        assert not here.frames
    assert not any(c._penalties for c in reg.clones)
    for clone in [*reg.clones, *fresh.clones]:
        if isinstance(clone, Trap):
            clone.armed = False
    (got, terms), (expected, fresh_terms) = (
        loss_of(model, reg, family.inputs),
        loss_of(fresh.model, fresh, family.inputs),
    )
    assert torch.equal(got, expected)
    assert {k: v.item() for k, v in terms.items()} == {k: v.item() for k, v in fresh_terms.items()}


def test_an_error_inside_an_inlined_linear_leaves_the_model_as_new():
    """timm's EVA calls F.linear with the weight of its qkv map: the next forward must look at it again."""
    family = FAMILIES["timm_beit"]  # qkv with a bias that is put together in the forward
    model = family.model()
    reg = dampen.regularize(model, everything())
    fresh = copy.deepcopy(reg)
    for module in model.modules():
        if hasattr(module, "qkv"):
            kept, module.qkv.weight = module.qkv.weight, nn.Parameter(torch.zeros(3, 5))
            break
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loss_of(model, reg, family.inputs)
    module.qkv.weight = kept
    assert not any(layer.frames for layer in reg.layers)
    got, terms = loss_of(model, reg, family.inputs)
    expected, _ = loss_of(fresh.model, fresh, family.inputs)
    assert torch.equal(got, expected)
    assert terms["explicit_dropout.value"] > 0


def test_an_error_of_the_model_itself_leaves_nothing():
    """Padding of the wrong length: torch raises below our hooks, after the first layers have penalized."""
    family = FAMILIES["hf_bert"]
    model = family.model()
    reg = dampen.regularize(model, everything())
    fresh = copy.deepcopy(reg)
    last = reg.layers[-1].site.name
    hook = model.get_submodule(last).register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, reg, family.inputs)
    hook.remove()
    assert torch.equal(
        loss_of(model, reg, family.inputs)[0], loss_of(fresh.model, fresh, family.inputs)[0]
    )


# --- threads


def in_threads(run, count=4):
    """Run `run(i)` in as many threads at once; what each returned, or the error that it raised."""
    results, errors = [None] * count, []
    barrier = threading.Barrier(count)

    def work(i):
        barrier.wait()
        try:
            results[i] = run(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, errors


@pytest.mark.parametrize("name", ["hf_bert", "encoder_post", "timm_swin", "own_encoder"])
def test_threads_that_train_one_model_compute_the_right_penalties(name):
    """Deterministic penalties of other data in each thread, with padding: each thread has its own, every time."""
    family = FAMILIES[name]
    model = family.model()
    reg = dampen.regularize(
        model, ExplicitDropout(query=0.3, value=0.5, attended_value=0.2, ffn=0.4)
    )

    def inputs(i):
        changed = dict(family.inputs)
        key = next(iter(changed))
        changed[key] = changed[key].roll(i + 1, -1) * (
            1 if changed[key].dtype == torch.long else 1 + i / 4
        )
        return changed

    def step(i):
        out = output(model(**inputs(i)))
        taken = reg.penalties()
        gradient = torch.autograd.grad(out.float().square().mean() + sum(taken.values()), list(model.parameters())[-4:],
                                       allow_unused=True)  # fmt: skip
        return {k: v.detach() for k, v in taken.items()}, [g for g in gradient if g is not None]

    alone = [step(i) for i in range(4)]
    for _ in range(10):
        got, errors = in_threads(step)
        assert not errors
        for (terms, gradients), (expected, expected_gradients) in zip(got, alone, strict=True):
            torch.testing.assert_close(terms, expected)
            torch.testing.assert_close(gradients, expected_gradients)
    assert not any(c._penalties for c in reg.clones)
    assert not any(layer.frames for layer in reg.layers)


def test_a_forward_in_a_worker_thread_gives_its_penalties_to_the_thread_that_asks():
    family = FAMILIES["own_vit"]
    model = family.model()
    reg = dampen.regularize(model, ExplicitDropout(value=0.5))
    model(**family.inputs)
    expected = reg.penalty()
    thread = threading.Thread(target=lambda: model(**family.inputs))
    thread.start()
    thread.join()
    torch.testing.assert_close(reg.penalty(), expected)


def test_two_pass_steps_in_two_threads_are_refused():
    family = FAMILIES["own_vit"]
    model = family.model()
    reg = dampen.regularize(model, [DropKey(0.2), RDrop(1.0)])
    meet = threading.Barrier(2)

    def criterion(out):
        return out.square().mean()

    def forward():
        meet.wait(timeout=20)
        return model(**family.inputs)

    def step(i):
        try:
            return reg.loss(forward, criterion)
        finally:
            meet.abort()

    _, errors = in_threads(step, 2)
    assert any("two passes is under way in another thread" in str(e) for e in errors)
    assert torch.isfinite(
        reg.loss(lambda: model(**family.inputs), criterion)[0]
    )  # and nothing is left behind


def test_data_parallel_replicas_are_refused_with_the_reason():
    """`nn.DataParallel` copies modules by `_replicate_for_data_parallel`, which the CPU can do too."""
    model = FAMILIES["own_vit"].model()
    dampen.regularize(model, DropKey(0.3))
    replica = as_replica(model)
    with pytest.raises(RuntimeError, match="nn.DataParallel runs a copy .*DistributedDataParallel"):
        replica(IMAGES)
    model.eval()
    assert torch.equal(
        as_replica(model)(IMAGES), model(IMAGES)
    )  # without regularizers at work replicas are fine
    model.train()
    nn.DataParallel(model)(IMAGES)  # on one device, or none, it makes no copies


def as_replica(module):
    copied = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else as_replica(child)
    for name, parameter in module._parameters.items():
        copied._parameters[name] = parameter
    return copied


# --- what must keep working


def test_copies_made_in_the_middle_of_a_forward_are_whole():
    family = FAMILIES["own_vit"]
    model = family.model()
    reg = dampen.regularize(model, everything())
    copies = []
    hook = model.blocks[-1].register_forward_hook(lambda *_: copies.append(copy.deepcopy(reg)))
    loss_of(model, reg, family.inputs)
    hook.remove()
    model.blocks[-1]._forward_hooks.clear()
    copied = copies[0]
    copied.model.blocks[-1]._forward_hooks.clear()
    assert not any(layer.frames for layer in copied.layers)
    assert torch.equal(
        loss_of(copied.model, copied, family.inputs)[0], loss_of(model, reg, family.inputs)[0]
    )


class LooseLayers(nn.Module):
    """No module is the block: attention and feed-forward stand in a list and the model adds them itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([
            nn.MultiheadAttention(16, 2, batch_first=True),
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
        ]) for _ in range(2)])  # fmt: skip

    def forward(self, x, padding=None):
        for attention, feed_forward in self.layers:
            x = x + attention(x, x, x, key_padding_mask=padding)[0]
            x = x + feed_forward(x)
        return x


def test_padding_reaches_the_feed_forward_without_a_block():
    torch.manual_seed(0)
    model = LooseLayers().train()
    reg = dampen.regularize(model, ExplicitDropout(ffn=0.5))
    padding = PADDING == 0
    model(FEATURES, padding)
    penalty = reg.penalty()
    changed = FEATURES.clone()
    changed[padding] = 100.0
    model(changed, padding)
    torch.testing.assert_close(reg.penalty(), penalty)
    model(changed)  # and the next forward, without padding, counts every token
    assert reg.penalty() > 2 * penalty


def test_checkpointed_blocks_have_frames_of_their_own():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    reg = dampen.regularize(layer, [ExplicitDropout(value=0.5, ffn=0.5), DropPath(0.3)])
    gradients = []
    for run in (lambda x: layer(x), lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        loss = run(FEATURES).square().mean() + reg.penalty()
        gradients.append(torch.autograd.grad(loss, list(layer.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert not any(one.frames for one in reg.layers)


@pytest.mark.parametrize("part", ["self_attn", "linear1"])
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo's own
def test_a_part_compiled_inside_an_eager_block_finds_its_frame(part):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(16, 2, batch_first=True)
            self.linear1, self.linear2 = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x, padding):
            x = x + self.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return x + self.linear2(F.gelu(self.linear1(x)))

    torch.manual_seed(0)
    model = Block().train()
    reg = dampen.regularize(model, [ExplicitDropout(value=0.5, ffn=0.5), DropPath(0.0)])
    model(FEATURES, PADDING == 0)
    expected = reg.penalty()
    getattr(model, part).compile(backend="eager")
    model(FEATURES, PADDING == 0)
    torch.testing.assert_close(reg.penalty(), expected)


def test_swin_is_switched_to_sdpa_by_two_forwards_at_once_and_back():
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), num_heads=(2, 4), embed_dim=16,
        num_classes=5,
    ).train()  # fmt: skip
    dampen.regularize(model, DropKey(0.2))
    _, errors = in_threads(lambda _: model(IMAGES))
    assert not errors
    assert not any(m.fused_attn for m in model.modules() if hasattr(m, "fused_attn"))


def test_cross_attention_knows_its_queries():
    family = FAMILIES["decoder_pre_seq_first"]
    model = family.model()
    reg = dampen.regularize(model, ExplicitDropout(value=0.5, ffn=0.5))
    model(**family.inputs)
    assert reg.penalty() > 0
    assert MEMORY.shape[1] == 5
