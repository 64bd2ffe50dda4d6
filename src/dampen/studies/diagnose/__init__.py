"""Everything that can be measured on a trained model: of a run of a study, or of
any model with a data set.

dampen diagnose runs/demo
"""

from dampen.studies.diagnose.measure import SECTIONS, Section, Settings, diagnose
from dampen.studies.diagnose.trained import Trained, find_trials, from_model, from_run

__all__ = [
    "SECTIONS",
    "Section",
    "Settings",
    "Trained",
    "diagnose",
    "find_trials",
    "from_model",
    "from_run",
]
