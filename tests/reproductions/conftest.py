"""The plug-in under test, with its data sets, models and tasks; small trials as in the tests of the studies."""

import reproductions  # noqa: F401 - registers
from tests.studies.conftest import _one_thread, quick, small  # noqa: F401 - fixtures
