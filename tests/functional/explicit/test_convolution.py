"""Convolutions: every mask, the paper's trace, real dropout; the hook's handle."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dampen
from dampen.functional.explicit import convolution_penalty, regularize_convolutions
from dampen.functional.explicit.reductions import FORMS, REDUCTIONS
from tests.oracles import explicit as slow

RATE = 0.25
CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(2, 3, 3), (2, 6)),
    "1d, grouped, dilated, strided": (lambda: nn.Conv1d(4, 6, 2, stride=2, dilation=2, padding=1, groups=2), (4, 7)),
    "1d, circular": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular", bias=False), (2, 5)),
    "2d": (lambda: nn.Conv2d(2, 3, 2), (2, 3, 4)),
    "2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 4, 3)),
    "2d, grouped, dilated, strided": (
        lambda: nn.Conv2d(4, 6, (2, 3), stride=(1, 2), padding=(1, 2), dilation=(2, 1), groups=2), (4, 4, 5),
    ),
    "2d, reflect": (lambda: nn.Conv2d(2, 2, (1, 3), padding=(0, 1), padding_mode="reflect"), (2, 3, 4)),
}  # fmt: skip


def build(name):
    torch.manual_seed(0)
    make, shape = CONVOLUTIONS[name]
    return make().double(), torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)


def expected(x, conv, form, reduction):
    def one(sample):
        if form == "paper":
            return slow.trace_convolution(sample, conv, RATE)
        return slow.enumerate_convolution(sample, conv, RATE, form == "inverted")

    positions = conv(x[:1]).flatten(2).shape[2]
    divisor = {"sum": 1, "mean": 2 * positions, "token_mean": positions, "author": positions / 2}[
        reduction
    ]
    return sum(one(sample) for sample in x) / divisor


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_values_and_gradients(name, form):
    conv, x = build(name)
    for reduction, given in itertools.product(
        REDUCTIONS if name == "2d" else ["mean"], [True, False]
    ):
        output = conv(x) if given else None
        value = convolution_penalty(x, conv, RATE, form=form, reduction=reduction, output=output)
        oracle = expected(x, conv, form, reduction)
        torch.testing.assert_close(value, oracle, rtol=1e-12, atol=0)
        grads = torch.autograd.grad(value, [x, conv.weight])
        for a, b in zip(grads, torch.autograd.grad(oracle, [x, conv.weight]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_dropout_before_the_convolution():
    """One mask on the image, shared by overlapping patches: each output has the expectation of its own patch."""
    conv, x = build("2d, grouped, dilated, strided")
    image = x.detach()[0]
    with torch.no_grad():
        mean, error = slow.sample_change(
            lambda drop: conv(drop(image.expand(20_000, *image.shape))), 0.3, draws=20_000
        )
    value = convolution_penalty(image[None], conv, 0.3, form="inverted", reduction="sum").item()
    assert abs(mean - value) < 4 * error
    assert error < 0.01 * value


OTHERS = {
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=(0, 1, 0)), (2, 2, 1, 3)),
    "3d, grouped, dilated, strided": (
        lambda: nn.Conv3d(2, 4, (1, 2, 2), stride=(1, 2, 1), dilation=(1, 1, 2), padding=1, groups=2), (2, 1, 2, 3),
    ),
    "transposed 1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (2, 5)),
    "transposed 1d, grouped, dilated, strided, padded": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2, dilation=2), (4, 3),
    ),
    "transposed 2d": (lambda: nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), bias=False), (2, 2, 3)),
    "transposed 2d, depthwise": (lambda: nn.ConvTranspose2d(3, 3, 2, stride=2, groups=3), (3, 2, 2)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1), output_padding=(0, 1, 0)), (2, 1, 2, 3)),
}  # fmt: skip


def dense(conv, shape, **kwargs):
    """The matrix (outputs, inputs) of a convolution, column by column, and its output positions."""
    with torch.no_grad():
        at_zero = conv(torch.zeros(1, *shape, dtype=torch.float64), **kwargs)
    count = torch.Size(shape).numel()
    columns = conv(torch.eye(count, dtype=torch.float64).view(count, *shape), **kwargs) - at_zero
    return columns.flatten(1).T, at_zero[0, 0].numel()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OTHERS)
def test_three_axes_and_transposed_ones(name, form):
    """Against every mask of the whole input, through the dense matrix: overlapping patches share their masks there, and
    each output has the expectation of its own."""
    torch.manual_seed(0)
    make, shape = OTHERS[name]
    conv, x = make().double(), torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    matrix, positions = dense(conv, shape)

    def one(sample):
        if form == "paper":
            return slow.trace_linear(sample[None], matrix, RATE)
        return slow.enumerate_linear(sample, matrix, RATE, form == "inverted")

    total = sum(one(sample.flatten()) for sample in x)
    for reduction, given in itertools.product(REDUCTIONS, [True, False]):
        divisor = {
            "sum": 1,
            "mean": 2 * positions,
            "token_mean": positions,
            "author": positions / 2,
        }[reduction]
        output = conv(x) if given else None
        value = convolution_penalty(x, conv, RATE, form=form, reduction=reduction, output=output)
        torch.testing.assert_close(value, total / divisor, rtol=1e-10, atol=0)
        grads = torch.autograd.grad(value, [x, conv.weight])
        expected_grads = torch.autograd.grad(total / divisor, [x, conv.weight], retain_graph=True)
        for a, b in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_the_size_that_a_transposed_convolution_was_asked_for():
    torch.manual_seed(0)
    conv = nn.ConvTranspose1d(2, 3, 3, stride=3).double()
    x = torch.randn(1, 2, 3, dtype=torch.float64)
    matrix, positions = dense(conv, (2, 3), output_size=[11])
    assert positions == 11
    value = convolution_penalty(x, conv, RATE, form="exact", output=conv(x, output_size=[11]))
    expected_value = slow.enumerate_linear(x.flatten(), matrix, RATE, False) / positions
    torch.testing.assert_close(value, expected_value, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_is_found_in_a_model(name):
    make, shape = OTHERS[name]
    net = nn.Sequential(make().double())
    handle = regularize_convolutions(net, weight=2.0, rate=RATE, form="exact")
    x = torch.randn(2, *shape, dtype=torch.float64)
    net(x)
    torch.testing.assert_close(
        handle.penalty(), 2 * convolution_penalty(x, net[0], RATE, form="exact")
    )


def test_forwards_add_up_until_they_are_taken():
    """As `regularize` does: both of a siamese step count, those in eval, under no_grad and of an empty batch do not."""
    net, x, y = model(), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    handle = regularize_convolutions(net, weight=1.0)
    parts = []
    for t in (x, y):
        net(t)
        parts.append(handle.penalty())
    net(x)
    net(y)
    with torch.no_grad():
        net(x)
    net.eval()(x)
    net.train()(x[:0])
    torch.testing.assert_close(handle.penalty(), parts[0] + parts[1])
    assert handle.penalty().item() == 0


def test_a_penalty_that_was_left_out_of_the_loss_is_reported():
    net, x = model(), torch.randn(2, 3, 8, 8)
    handle = regularize_convolutions(net, weight=1.0)
    net(x).sum().backward()
    with pytest.raises(
        RuntimeError, match="a backward pass ran through the model while its penalties"
    ):
        net(x)
    handle.remove()
    handle = regularize_convolutions(net, weight=1.0, strict=False)
    net(x).sum().backward()
    net(x).sum().backward()
    assert handle.penalty().item() > 0


def test_an_image_without_a_batch():
    conv, x = build("2d")
    one = convolution_penalty(x[0], conv, RATE, form="exact", output=conv(x[0]))
    torch.testing.assert_close(one, convolution_penalty(x[:1], conv, RATE, form="exact"))


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ReLU(inplace=True),
    )


def test_the_hook_adds_up_all_convolutions_and_can_be_removed():
    net, x = model(), torch.randn(2, 3, 8, 8)
    handle = regularize_convolutions(net, weight=[0.5, 0.25], rate=RATE, form="exact")
    hidden = nn.functional.relu(net[0](x))
    handle.penalty()
    parts = [convolution_penalty(i, net[k], RATE, form="exact") for k, i in ((0, x), (2, hidden))]
    net(x)
    total = handle.penalty()
    torch.testing.assert_close(total, 0.5 * parts[0] + 0.25 * parts[1])
    total.backward()  # with activations that change the outputs in place
    assert all(m.weight.grad is not None for m in (net[0], net[2]))
    net.eval()(x)
    assert handle.penalty().item() == 0
    handle.remove()
    net.train()(x)
    assert handle.penalty().item() == 0
    assert not net[0]._forward_hooks
    assert not net._forward_pre_hooks


def test_the_hook_keeps_the_contracts_of_penalties():
    net, x = model(), torch.randn(2, 3, 8, 8)
    handle = regularize_convolutions(
        net, weight=dampen.linear(0.0, 1.0, along="progress"), rate=RATE
    )
    net(x)
    assert handle.penalty().item() == 0
    handle.progress(1.0)
    net(x)
    once = handle.penalty()
    assert once.item() > 0
    out = checkpoint(net, x, use_reentrant=False)
    again = handle.penalty()
    (out.sum() + again).backward()
    torch.testing.assert_close(again, once)
    assert handle.penalty().item() == 0  # the recompute adds nothing
    twin_net, twin = copy.deepcopy((net, handle))
    twin_net(x)
    torch.testing.assert_close(twin.penalty(), once)
    assert handle.penalty().item() == 0


def test_the_hook_compiles_into_one_graph():
    net, x = model(), torch.randn(2, 3, 8, 8)
    handle = regularize_convolutions(net, weight=1.0, form="exact")
    net(x)
    eager = handle.penalty()
    torch.compile(net, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(handle.penalty(), eager)


def test_weight_zero_opens_nothing():
    net = model()
    handle = regularize_convolutions(net, weight=0)
    assert not net[0]._forward_hooks
    assert handle.penalty().item() == 0


@pytest.mark.parametrize(("arguments", "text"), [
    ({"weight": -1.0}, "finite number >= 0, got -1.0"),
    ({"rate": 1.0}, "probability in \\[0, 1\\), got 1.0"),
    ({"form": "papers"}, "form must be one of paper, exact, inverted, got 'papers'"),
    ({"reduction": "max"}, "reduction must be one of mean, sum, token_mean, author, got 'max'"),
    ({"target_modules": "stem.*"}, "Convolutions found: 0, 2"),
    ({"weight": [1.0]}, "has 1 values, but 2 layers"),
])  # fmt: skip
def test_bad_input(arguments, text):
    with pytest.raises(ValueError, match=text):
        regularize_convolutions(model(), **arguments)


def test_not_a_convolution():
    with pytest.raises(
        TypeError, match="takes nn.Conv1d, nn.Conv2d, nn.Conv3d or a transposed one, got Linear"
    ):
        convolution_penalty(torch.randn(2, 3), nn.Linear(3, 3), 0.1)
    with pytest.raises(ValueError, match="progress is the fraction of training"):
        regularize_convolutions(model()).progress(2.0)
