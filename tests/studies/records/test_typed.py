"""Events of workers and diagnoses are typed, with a format; what older versions wrote still loads."""

from pathlib import Path

import pytest

from dampen.studies.diagnose.measure import SECTIONS as MEASURED
from dampen.studies.engines import Job, run_job
from dampen.studies.errors import LabError
from dampen.studies.files import read_json
from dampen.studies.result import (
    DIAGNOSIS_FORMAT,
    SECTIONS,
    Event,
    parse_diagnosis,
    parse_event,
    parse_lines,
)
from dampen.studies.result import EVENT_FORMAT as EVENT_FORMAT

RESULTS = Path(__file__).parents[3] / "reproductions" / "attentiondrop" / "results"


def test_every_event_of_a_trial_is_understood(tmp_path, small, quick):
    sent = []
    outcome = run_job(Job(small(), tmp_path / "run"), quick, sent.append, lambda: False)
    events = [parse_event(e) for e in sent]
    assert outcome.status == "finished", outcome.message
    assert {e.kind for e in events} == {"start", "progress", "epoch", "finish"}
    assert {e.format for e in events} == {EVENT_FORMAT}
    for plain, event in zip(sent, events, strict=True):
        for (
            key,
            value,
        ) in plain.items():  # nothing is lost on the way but what a listener has no use for
            if key in Event.__struct_fields__:
                assert getattr(event, key) == value, key
    assert set().union(*sent) - set(Event.__struct_fields__) <= {"lr", "seconds", "conditioning"}
    assert events[-1].status == "finished"
    assert events[-1].test == outcome.result["test"]


def test_an_event_of_an_older_or_newer_worker():
    assert parse_event({"kind": "progress", "step": 3, "steps": 9}).format == 0
    assert (
        parse_event({"kind": "warning", "message": "m", "format": 7, "color": "red"}).message == "m"
    )
    with pytest.raises(LabError, match="not what was expected.*kind.*nonsense"):
        parse_event({"kind": "nonsense"})


def test_diagnoses_packed_before_they_were_typed_load():
    """The committed packs hold diagnose.json of version 0.1."""
    packed = read_json(RESULTS / "cifar10.json")["folders"].values()
    contents = [files["diagnose.json"] for files in packed if "diagnose.json" in files]
    assert contents
    for content in contents:
        diagnosis = parse_diagnosis(content)
        assert diagnosis
        for name in SECTIONS:
            assert diagnosis.section(name) == (
                content.get(name) or type(diagnosis.section(name))()
            ), name


def test_a_diagnosis_of_the_first_kind_and_a_damaged_one():
    old = parse_diagnosis(
        {"trial": "a", "calibration": {"ece": 0.1}, "seconds": {"calibration": 1}}
    )
    assert (old.format, old.calibration, bool(old)) == (0, {"ece": 0.1}, True)
    assert (
        parse_diagnosis({"format": DIAGNOSIS_FORMAT, "something new": 1}).format == DIAGNOSIS_FORMAT
    )
    with pytest.raises(LabError, match="diagnose.json is not what was expected.*robustness"):
        parse_diagnosis({"robustness": 3})


def test_every_section_that_is_measured_counts():
    """Those that 0.2 measured and this version does not are read as before."""
    assert set(MEASURED) <= set(SECTIONS)
    for name in SECTIONS:
        content = [{"x": 1}] if name in ("robustness", "conditioning") else {"x": 1}
        assert parse_diagnosis({name: content}).section(name) == content


def test_a_users_own_words_in_a_log_are_no_damage():
    """`trial.log(variance=0.1, conditioning={...})` of one's own training: they are not our trainer's measurements."""
    own, ours = parse_lines(
        [{"variance": 0.1, "conditioning": {"a": 1.0}}, {"variance": [{"step": 0, "trace": 1.0}]}]
    )
    assert (
        own.measured("variance")
        == own.measured("conditioning")
        == ours.measured("conditioning")
        == []
    )
    assert ours.measured("variance") == [{"step": 0, "trace": 1.0}]
