"""`regularize` takes the texts of `compare`, and its errors name what to write instead."""

import pytest
import torch

import dampen
from dampen import DropHead, DropKey, DropPath
from dampen.hooks.describe import span
from dampen.texts import TextError, read_methods


def vit(depth=3):
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=depth, heads=2, mlp=16)


def test_a_text_is_what_its_objects_are():
    one = dampen.regularize(vit(), "drop_key(rate=linear(0.3, 0), unit=column) + drop_head")
    two = dampen.regularize(vit(), [DropKey(dampen.linear(0.3, 0.0), unit="column"), DropHead()])
    assert str(one) == str(two)
    mixed = dampen.regularize(vit(), ["drop_key", DropHead()])
    assert [m.name for m in mixed.methods] == ["drop_key", "drop_head"]
    composed = dampen.regularize(vit(), "hidden_key")
    assert [m.name for m in composed.methods] == ["drop_key", "hidden_dropout", "r_drop"]


def test_regularize_and_compare_read_the_same_texts():
    from dampen.studies.methods_text import build_methods, parse_rows

    for text in (
        "drop_key(unit=column)",
        "drop_path(rate=late(0.3)) + r_drop",
        "drop_key(unit='column')",
    ):
        (specs,) = parse_rows(text).values()
        assert [*map(str, read_methods(text))] == [*map(str, build_methods(specs))]


@pytest.mark.parametrize(
    ("methods", "kind", "words"),
    [
        ("drop_kye", ValueError, "did you mean 'drop_key'"),
        ("drop_key(rat=0.1)", ValueError, "drop_key has no argument 'rat'; did you mean 'rate'?"),
        ("drop_key, drop_head", ValueError, "write 'drop_key + drop_head'"),
        ("plain", ValueError, "names no method"),
        ("drop_key(rate=0.1", ValueError, "a bracket is not closed"),
        (DropKey, TypeError, "got the class DropKey. Write DropKey()"),
        ([DropHead(), DropPath], TypeError, "got the class DropPath. Write DropPath()"),
        (dampen.ExplicitDropout, TypeError, "Write ExplicitDropout(value="),
        (None, TypeError, "got None"),
        (3, TypeError, "not iterable"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_write(methods, kind, words):
    with pytest.raises(kind) as error:
        dampen.regularize(vit(), methods)
    assert words in str(error.value)


def test_a_mistyped_argument_is_named_with_the_nearest():
    with pytest.raises(TypeError, match="DropKey has no argument 'rat'; did you mean 'rate'?"):
        DropKey(rat=0.1)
    with pytest.raises(TypeError, match="did you mean 'target_modules'?"):
        dampen.regularize(vit(), DropKey(), target_module="*")

    class Mine(DropKey):
        def __init__(self, strength=0.1):
            super().__init__(rate=strength)

    assert Mine(strength=0.3).rate == 0.3
    with pytest.raises(
        TypeError, match="Mine has no argument 'strenght'; did you mean 'strength'?"
    ):
        Mine(strenght=0.3)


def test_the_same_method_twice_warns():
    with pytest.warns(UserWarning, match="got DropKey 2 times"):
        dampen.regularize(vit(), [DropKey(0.1), DropKey(0.2)])


def test_print_groups_equal_layers():
    reg = dampen.regularize(vit(12), DropKey(0.1))
    lines = str(reg).splitlines()
    assert sum("DropKey(rate=0.1" in line for line in lines) == 1
    assert any(line.startswith("  blocks.0-11 ") for line in lines)
    falling = str(dampen.regularize(vit(3), DropKey(dampen.linear(0.3, 0.0))))
    assert falling.count("DropKey(rate=") == 3
    assert (
        span(["encoder.0.attn", "decoder.0.attn"]) == "encoder.0.attn ... decoder.0.attn (2 layers)"
    )


def test_print_names_the_command_that_builds_the_kernels(monkeypatch):
    from dampen.native import library

    reg = dampen.regularize(vit(), DropKey(0.1))
    monkeypatch.setattr(library, "available", lambda: False)
    monkeypatch.setattr(library, "status", lambda: "off: not built (dampen doctor --build)")
    assert "not built: dampen doctor --build" in str(reg)
    monkeypatch.setattr(library, "status", lambda: "off: DAMPEN_NATIVE=0")
    assert "doctor" not in str(reg)


def test_text_errors_carry_every_problem():
    with pytest.raises(TextError) as error:
        read_methods("drop_key(rat=0.1, unti=column)")
    assert len(error.value.problems) == 2
