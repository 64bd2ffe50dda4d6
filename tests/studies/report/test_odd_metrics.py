"""Results without a number: the report is written all the same, and says so."""

import json
import re

import pytest

from dampen.studies.report import make_report
from tests.studies.synthetic_runs import write_study


@pytest.mark.parametrize("value", [None, "NaN", "Infinity"])
@pytest.mark.parametrize("key", ["test", "valid"])
@pytest.mark.parametrize("how_many", [1, 1000])
def test_reports_of_metrics_that_are_no_numbers(tmp_path, value, key, how_many):
    """JSON written by others may hold NaN and Infinity; ours holds null."""
    plan = write_study(tmp_path / "one")
    for trial in list(plan.runs)[:how_many]:
        path = tmp_path / "one" / trial / "final.json"
        final = json.loads(path.read_text())
        final.pop("checksum", None)
        final[key] = dict.fromkeys(final[key], "ODD")
        path.write_text(json.dumps(final).replace('"ODD"', "null" if value is None else value))
    report = make_report([tmp_path / "one"])
    for format in ("html", "md", "csv", "json", "latex"):
        text = report.render(format)
        assert text
        if format == "json":
            json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        if key == "test" and format in ("html", "md", "json"):
            assert re.search(
                "no number(, accuracy is| from seed)", text
            )  # a mean over fewer seeds than planned
