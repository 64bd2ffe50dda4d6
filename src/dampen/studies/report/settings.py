"""What each method was run with: its settings in words, the line of Python that uses it, and names
without what all methods share."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dampen.extensions import is_in_file
from dampen.registry import find_method
from dampen.studies.methods_text import OBJECT, methods_as_text, python_call
from dampen.studies.table import Entry, ResultTable, axis_name, grid_text
from dampen.studies.trainer.data import places

IGNORED = ("id", "seed", "format", "methods")
"""Keys of a run's configuration that are no setting of its method."""


def methods_of(entry: Entry) -> list[dict[str, Any]]:
    """The methods as they ran, with the values of the grid or of the tuning.

    Args:
        entry: the results of one configuration.
    """
    runs = list(entry.setting.logged.values())
    found: list[dict[str, Any]] = runs[0].config.get("methods", []) if runs else []
    return found or entry.config.methods


def settings_text(entry: Entry, reference: Entry | None = None) -> str:
    """The values a method was run with, defaults too, and what else differs from the baseline.

    Args:
        entry: the results of one configuration.
        reference: the baseline.
    """
    methods = methods_of(entry)
    several = len(methods) > 1
    parts = [
        f"{method['name']}: {text}" if several else text
        for method in methods
        if (text := _arguments(method))
    ]
    differing = differences(reference, entry) if reference and reference is not entry else {}
    parts += [f"{axis_name(key)}={_short(value)}" for key, (_, value) in differing.items()]
    known = " ".join(parts)
    grid = {k: v for k, v in entry.setting.grid.items() if axis_name(k) not in known}
    tuned = {k: v for k, v in grid.items() if k.startswith(("train.", "params.", "lr"))}
    return "; ".join([*parts, *([grid_text(tuned)] if tuned else [])])


def _arguments(method: Mapping[str, Any]) -> str:
    """The arguments of one method: those that were passed, else the first default of its class."""
    if OBJECT in method:
        return str(method.get("shown", method["name"])).partition("(")[2].removesuffix(")")
    given = {k: v for k, v in method.items() if k not in ("name", "code")}
    if not given and not is_in_file(method["name"]):
        signature = inspect.signature(find_method(method["name"])).parameters
        first = [(k, p.default) for k, p in signature.items() if p.default is not p.empty][:1]
        given = dict(first)
    text = methods_as_text([{"name": "", **given}])
    return text.removeprefix("(").removesuffix(")") if given else ""


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration by dotted keys, without what names the run.

    Args:
        config: plain data.
        prefix: of the keys.

    >>> flat({"train": {"lr": 0.1}, "seed": 3})
    {'train.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in IGNORED:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(one: Entry, two: Entry) -> dict[str, tuple[Any, Any]]:
    """Settings beside the methods that differ between two configurations: the value of each.

    Args:
        one: the results of one configuration.
        two: the results of another.
    """
    configs = [list(e.setting.logged.values()) for e in (one, two)]
    if not all(configs):
        return {}
    first, second = (flat(runs[0].config) for runs in configs)
    keys = dict.fromkeys([*first, *second])
    return {k: (first.get(k), second.get(k)) for k in keys if first.get(k) != second.get(k)}


def all_settings(entry: Entry) -> dict[str, str]:
    """Every setting of a method's runs, by dotted key, to be compared with another's.

    Args:
        entry: the results of one configuration.
    """
    runs = list(entry.setting.logged.values())
    found = {k: str(v) for k, v in flat(runs[0].config).items()} if runs else {}
    for method in methods_of(entry):
        for key, value in method.items():
            if key != "name":
                found[f"{method['name']}.{key}"] = str(value)
    return found | {"methods": " + ".join(m["name"] for m in methods_of(entry)) or "none"}


def regularize_line(entry: Entry, reference: Entry | None = None) -> str:
    """The line of Python that puts these methods into a model.

    Args:
        entry: the results of one configuration.
        reference: the baseline; other settings that differ from it stand in a comment.
    """
    calls = [python_call(method) for method in methods_of(entry)]
    differing = differences(reference, entry) if reference and reference is not entry else {}
    other = ", ".join(f"{axis_name(k)}={_short(v)}" for k, (_, v) in differing.items())
    if not calls:
        return f"# train with {other}" if other else ""
    runs = list(entry.setting.logged.values())
    sites = places(runs[0].config.get("sites", "*")) if runs else {}
    where = "".join(f", {k}={v!r}" for k, v in sites.items() if v != "*")
    methods = calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]"
    return f"dampen.regularize(model, {methods}{where})" + (f"  # with {other}" if other else "")


def more_seeds(table: ResultTable, folder: Path | None = None) -> str:
    """What to type so that inconclusive methods get more seeds; empty where
    nothing is inconclusive.

    Args:
        table: the runs of a study, judged.
        folder: of the study, if its command is not known.
    """
    if not any(e.verdict == "inconclusive" and not e.same_as for e in table.entries):
        return ""
    commands = str(table.study.header.get("command", "")).split(" && ")
    compared = [c for c in commands if c.startswith("dampen compare ")]
    if compared:
        command = compared[-1]
        return command if "--until-decided" in command else f"{command} --until-decided"
    runs = table.study.runs()
    place = folder or (runs[0].folder.parent if runs else None)
    if any(commands) or place is None:
        return ""
    return f"python -c {shlex.quote(f'import dampen; dampen.load({str(place)!r}).add(seeds=8)')}"


# --------------------
# Names. "vit + drop_key" and "vit + drop_head" share "vit": it is shown once, above the table.

JOINTS = (" + ", " · ")


def shared_text(names: Sequence[str]) -> tuple[str, str]:
    """What all names begin with and end with, whole parts only.

    Args:
        names: at least two, or nothing is shared.

    >>> shared_text(["vit + drop_key", "vit + drop_head"])
    ('vit + ', '')
    >>> shared_text(["drop_key", "drop_head"])
    ('', '')
    """
    if len(names) < 2:
        return "", ""
    for joint in JOINTS:
        split = [name.split(joint) for name in names]
        shortest = min(map(len, split)) - 1
        front = next(
            (i for i in range(shortest) if len({s[i] for s in split}) > 1), max(0, shortest)
        )
        ends = [s[::-1] for s in split]
        back = next(
            (i for i in range(shortest - front) if len({s[i] for s in ends}) > 1),
            max(0, shortest - front),
        )
        if front or back:
            first = split[0]
            return (
                "".join(part + joint for part in first[:front]),
                "".join(joint + part for part in first[len(first) - back :]) if back else "",
            )
    return "", ""


def shorten(table: ResultTable) -> tuple[ResultTable, str]:
    """The table with names without what all its methods share, and a
    sentence that says what that is.

    Args:
        table: the runs of a study, judged.
    """
    references = {e.reference for e in table.entries if e.reference}
    judged = [e.config.name for e in table.entries if e.name not in references]
    front, back = shared_text(list(dict.fromkeys(judged)))
    shared = " + ".join(part for part in (front.strip(" +·"), back.strip(" +·")) if part)
    if not shared:
        return table, ""
    taken = {e.config.name for e in table.entries}

    def cut(name: str) -> str:
        short = name.removeprefix(front)
        tail = short.find(back) if back else -1
        short = short[:tail] + short[tail + len(back) :] if tail > 0 else short
        return short if name.startswith(front) and back in name and short not in taken else name

    names = {e.name: cut(e.name) if e.name not in references else e.name for e in table.entries}
    configs = {id(c): replace(c, name=cut(c.name)) for c in table.study.configs}
    configs |= {id(c): c for c in table.study.configs if c.name in references}
    study = replace(table.study, configs=[configs[id(c)] for c in table.study.configs])
    entries = [
        replace(
            e,
            name=names[e.name],
            config=configs.get(id(e.config), e.config),
            same_as=names.get(e.same_as, e.same_as) if e.same_as else None,
        )
        for e in table.entries
    ]
    return ResultTable(study, entries), f"All methods: {shared}."
