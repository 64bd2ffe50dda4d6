"""Hypothesis strategies for what people type and files contain: near the grammar, so that parsers are really entered.

`benchmarks/reliability` draws from the same ones, many more times.
"""

import datetime

from hypothesis import strategies as st

from dampen.registry import methods
from dampen.studies.methods_text import SCHEDULES

NAMES = st.sampled_from([*methods(), "plain", "vit", "x", "timm/vit_tiny_patch16_224", "drop_kee"])
ARGUMENTS = st.sampled_from(
    ["rate", "weight", "unit", "window", "value", "ffn", "top", "name", "targets", "kind", "zz"]
)
LITERALS = st.sampled_from(
    "0.1 0 1 -1 1e999 -1e999 None True 'x' b'x' 1j ... [] () {} {1:2} {1} [1,[2]] x x.y f'{1}' lambda:0 1+2 -x "
    "0xFFFFFFFFFFFFFFFFFFFF {'linear':[0.3,0]} *a '\\d' ''".split()
) | st.integers(-(10**30), 10**30).map(str)


def _call(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})"


SCHEDULE = st.builds(_call, st.sampled_from([*SCHEDULES, "zigzag"]), st.lists(LITERALS, max_size=3))
VALUE = st.recursive(
    LITERALS | SCHEDULE,
    lambda inner: st.builds(_call, st.sampled_from(SCHEDULES), st.lists(inner, max_size=2)),
    max_leaves=4,
)
CALL = st.builds(
    _call,
    NAMES,
    st.lists(st.builds("{}={}".format, ARGUMENTS, VALUE) | LITERALS | st.just("**x"), max_size=3),
)
METHOD_TEXT = (
    st.lists(NAMES | CALL, min_size=1, max_size=4).map(", ".join)
    | st.lists(NAMES | CALL, min_size=1, max_size=4).map(" + ".join)
    | st.text(max_size=60)
    | st.sampled_from(
        [
            "(" * 300,
            "a" + ".b" * 3000,
            "-" * 5000 + "1",
            "+".join("a" * 3000),
            ")+(",
            "],[",
            "\0",
            "a#",
            "\\",
            "",
            ",",
        ]
    )
)
MODEL_TEXT = METHOD_TEXT | st.builds("timm/{}".format, METHOD_TEXT)
TOML_VALUE = st.sampled_from(
    "1 0.1 inf -inf nan true false 'x' [] [1,2] [[1]] {} {a=1} 1979-05-27 1979-05-27T07:32:00 07:32:00 word [1 "
    "99999999999999999999999 {name='vit'} {name=3} [{name='drop_key'}] '' -5".split()
) | st.sampled_from(["[" * 2000, "1\ny=2", "1\n[t]", "{a=" * 40 + "1" + "}" * 40])
KEY = st.lists(
    st.sampled_from([*"train model data methods sites pretrain lr epochs depth augment name betas zz".split(), ""]),
    min_size=1, max_size=4,
).map(".".join)  # fmt: skip
SETTING = st.builds("{}={}".format, KEY, TOML_VALUE) | KEY | st.text(max_size=30)

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([datetime.date(1979, 5, 27), datetime.time(7), datetime.datetime(1979, 5, 27)])
)  # fmt: skip
ANYTHING = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "a", "rate", "laptop"]) | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def mutated(good: dict, anything=ANYTHING):
    """A good table in which some places, at any depth, hold something else."""

    @st.composite
    def draw_from(draw):
        import copy

        content = copy.deepcopy(good)
        for _ in range(draw(st.integers(1, 3))):
            place = content
            for depth in range(5):
                key = draw(
                    st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
                )
                inside = place[key]
                if (
                    depth == 4
                    or not isinstance(inside, dict | list)
                    or not inside
                    or draw(st.booleans())
                ):
                    place[key] = draw(anything)
                    break
                place = inside
        return content

    return draw_from()
