"""The small DETR and its loss: overlap by hand, matching against all permutations, the loss against loops."""

import itertools
import math

import pytest
import torch

import dampen
from dampen.registry import methods
from reproductions.models.boxes import centers, corners, generalized_iou
from reproductions.models.detr import DETR, Detections, anchor_boxes
from reproductions.models.set_loss import focal, layer_loss, match, match_costs, set_loss


def tiny(**more):
    return DETR(
        image_size=(32, 48),
        classes=3,
        **{"width": 16, "depth": 2, "heads": 2, "mlp": 16, "queries": 6, **more},
    )


def made(seed=0, batch=3, queries=5, classes=3, most=4, dtype=torch.float64):
    """Detections and targets with different numbers of objects, one image without any."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, queries, classes, generator=g, dtype=dtype)
    boxes = torch.rand(batch, queries, 4, generator=g, dtype=dtype) * 0.5 + 0.2
    target = torch.full((batch, most, 5), -1.0, dtype=dtype)
    for i, n in enumerate([most, 0, 2][:batch]):
        target[i, :n, 0] = torch.randint(classes, (n,), generator=g).to(dtype)
        target[i, :n, 1:] = torch.rand(n, 4, generator=g, dtype=dtype) * 0.5 + 0.2
    return logits, boxes, target


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0, 0, 2, 2], [0, 0, 2, 2], 1.0),
        ([0, 0, 2, 2], [1, 1, 3, 3], 1 / 7 - 2 / 9),  # common 1, union 7, hull 9
        ([0, 0, 1, 1], [2, 0, 3, 1], 0 - 1 / 3),  # apart: union 2, hull 3
        ([0, 0, 4, 4], [1, 1, 2, 2], 1 / 16),  # inside: the hull is the larger
        ([1, 1, 1, 1], [1, 1, 1, 1], 0.0),  # two points at one place
    ],
)
def test_overlap_by_hand(a, b, expected):
    a, b = (torch.tensor(x, dtype=torch.float64) for x in (a, b))
    assert generalized_iou(a, b).item() == pytest.approx(expected, abs=1e-12)
    assert generalized_iou(b, a).item() == pytest.approx(expected, abs=1e-12)


def test_overlap_agrees_with_torchvision_and_has_a_gradient_where_boxes_are_apart():
    from torchvision.ops import generalized_box_iou

    a, b = (corners(made(seed)[1].flatten(0, 1)) for seed in (0, 1))
    torch.testing.assert_close(generalized_iou(a[:, None], b), generalized_box_iou(a, b))
    apart = torch.tensor([0.0, 0.0, 1.0, 1.0], requires_grad=True)
    generalized_iou(apart, torch.tensor([5.0, 0.0, 6.0, 1.0])).backward()
    assert apart.grad is not None
    assert apart.grad[2] > 0  # moving right brings it nearer
    torch.testing.assert_close(centers(corners(b)), b)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("queries", "most"), [(5, 4), (3, 3), (3, 5)])
def test_matching_is_the_cheapest_of_all_permutations(seed, queries, most):
    """Also where there are more objects than queries."""
    logits, boxes, target = made(seed, queries=queries, most=most)
    costs = match_costs(logits, boxes, target)
    image, query, thing = match(logits, boxes, target)
    for i in range(len(logits)):
        n = int((target[i, :, 0] >= 0).sum())
        own = image == i
        assert int(own.sum()) == min(n, queries)
        assert len(set(query[own].tolist())) == len(set(thing[own].tolist())) == min(n, queries)
        few, many = (range(n), range(queries)) if n <= queries else (range(queries), range(n))
        best = min(
            sum(
                costs[i, q, t].item() if n <= queries else costs[i, t, q].item()
                for t, q in zip(few, chosen, strict=True)
            )
            for chosen in itertools.permutations(many, len(few))
        )
        assert costs[i, query[own], thing[own]].sum().item() == pytest.approx(best)


def slow_loss(logits, boxes, target):
    """Loops over images, queries and classes, with Python's own numbers."""
    image, query, thing = (t.tolist() for t in match(logits, boxes, target))
    given = {(i, q): t for i, q, t in zip(image, query, thing, strict=True)}
    objects, total = int((target[..., 0] >= 0).sum()), 0.0
    for i, q in itertools.product(range(logits.shape[0]), range(logits.shape[1])):
        t = given.get((i, q))
        for c in range(logits.shape[2]):
            p = 1 / (1 + math.exp(-logits[i, q, c].item()))
            if t is not None and int(target[i, t, 0]) == c:
                total += 2 * -0.25 * (1 - p) ** 2 * math.log(p)
            else:
                total += 2 * -0.75 * p**2 * math.log(1 - p)
        if t is not None:
            mine, theirs = boxes[i, q], target[i, t, 1:]
            total += 5 * sum(
                abs(a - b) for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)
            )
            total += 2 * (1 - generalized_iou(corners(mine), corners(theirs)).item())
    return total / max(objects, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_loss_against_loops_and_its_gradient_against_differences(seed):
    logits, boxes, target = made(seed)
    assert layer_loss(logits, boxes, target).item() == pytest.approx(
        slow_loss(logits, boxes, target), rel=1e-5
    )
    logits.requires_grad_()
    wanted = torch.zeros_like(logits)
    wanted[0, 0, 1] = 1
    assert torch.autograd.gradcheck(lambda x: focal(x, wanted), logits)


def test_every_layer_counts_and_is_matched_on_its_own():
    first, last = made(1), made(2)
    target = last[2]
    found = Detections(last[0], last[1], ((first[0], first[1]),))
    expected = layer_loss(*first[:2], target) + layer_loss(*last[:2], target)
    torch.testing.assert_close(set_loss(found, target), expected)
    shuffled = target[:, [1, 0, 2, 3]].clone()
    shuffled[1:] = target[1:]  # the order of the objects of an image does not matter
    torch.testing.assert_close(set_loss(found, shuffled), expected)


def test_images_without_objects_only_teach_silence():
    logits, boxes, target = made()
    target[..., 0] = -1
    logits.requires_grad_()
    boxes.requires_grad_()
    layer_loss(logits, boxes, target).backward()
    assert (logits.grad > 0).all()
    assert not boxes.grad.any()


def test_queries_start_at_their_anchors_and_say_nothing():
    torch.manual_seed(0)
    model = tiny().eval()
    found = model(torch.randn(2, 3, 32, 48))
    torch.testing.assert_close(found.boxes, anchor_boxes(6, 1.5).expand(2, -1, -1))
    assert found.logits.sigmoid().max() < 0.1
    for queries in (1, 5, 48, 100):
        anchors = anchor_boxes(queries, 4 / 3)
        assert anchors.shape == (queries, 4)
        assert (corners(anchors) > -1e-6).all()
        assert (corners(anchors) < 1 + 1e-6).all()


def test_it_learns_where_one_box_is():
    torch.manual_seed(0)
    model, images = tiny(), torch.full((4, 3, 32, 48), -1.0)
    target = torch.tensor([[[1.0, 0.2, 0.3, 0.2, 0.3]], [[2.0, 0.7, 0.6, 0.2, 0.3]]]).repeat(
        2, 1, 1
    )
    for i, (_, x, y, w, h) in enumerate(target[:, 0].tolist()):
        box = corners(torch.tensor([x, y, w, h])) * torch.tensor([48, 32, 48, 32])
        left, top, right, bottom = box.round().int().tolist()
        images[i, int(target[i, 0, 0]), top:bottom, left:right] = 1.0
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(120):
        loss = set_loss(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    found = model(images)
    best = found.logits.amax(-1).argmax(-1)
    assert found.logits[torch.arange(4), best].argmax(-1).tolist() == [1, 2, 1, 2]
    overlap = generalized_iou(
        corners(found.boxes[torch.arange(4), best]), corners(target[:, 0, 1:])
    )
    assert (overlap > 0.5).all(), overlap


ARGUMENTS = {
    "arora_dropout": {"value": 0.05, "ffn": 0.05},
    "explicit_dropout": {"query": 0.05, "key": 0.05, "value": 0.05, "ffn": 0.05},
    "skip_ablation": {"attention": True},
    "token_graying": {"patch_size": 8},
}


@pytest.mark.parametrize(
    "name", [n for n, c in methods().items() if n != "patch_dropout" and not c.needs_adapters]
)
def test_every_method_attaches_and_trains(name):
    torch.manual_seed(0)
    model, target = tiny(), torch.tensor([[[1.0, 0.2, 0.3, 0.2, 0.3]], [[2.0, 0.7, 0.6, 0.2, 0.3]]])
    chosen = [methods()[name](**ARGUMENTS.get(name, {}))]
    chosen += [dampen.DropKey(0.2)] if name in ("consistency", "r_drop") else []
    reg = dampen.regularize(model, chosen)
    loss, _ = reg.loss(
        lambda: model(torch.randn(2, 3, 32, 48)), lambda found: set_loss(found, target)
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_dropping_patches_is_refused_by_their_fixed_places():
    """The only method that does not fit: fewer tokens than places."""
    model = tiny()
    dampen.regularize(model, [dampen.PatchDropout(0.5)])
    with pytest.raises(RuntimeError, match="PatchDropout works where positions are in the tokens"):
        model(torch.randn(2, 3, 32, 48))


def test_encoder_and_decoder_each_have_their_own_schedule():
    model = tiny(depth=3, decoder_depth=2)
    reg = dampen.regularize(model, [dampen.DropKey(rate=dampen.linear(0.3, 0.0))])
    model(torch.randn(2, 3, 32, 48))
    rates = [
        line.split("rate=")[1].split(",")[0] for line in str(reg).splitlines() if "rate=" in line
    ]
    assert rates == ["0.3", "0.15", "0", "0.3", "0"]
    assert "cross_attn" in str(reg)
    assert "self_attn" in str(reg)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="need a multiple of 8"):
        tiny(width=12)
    with pytest.raises(ValueError, match="32 x 48"):
        tiny()(torch.randn(1, 3, 32, 32))
