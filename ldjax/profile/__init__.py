"""Where the time of decoding goes, what would help, and projections."""

from ldjax.profile._accelerators import ACCELERATORS, Accelerator
from ldjax.profile._advice import advise
from ldjax.profile._html import to_html
from ldjax.profile._machine import Machine, measure_machine
from ldjax.profile._profile import profile
from ldjax.profile._project import project
from ldjax.profile._replay import Replay, replay
from ldjax.profile._tables import Table, tables
from ldjax.profile._work import StepWork, step_work

__all__ = [
  "ACCELERATORS",
  "Accelerator",
  "Machine",
  "Replay",
  "StepWork",
  "Table",
  "advise",
  "measure_machine",
  "profile",
  "project",
  "replay",
  "step_work",
  "tables",
  "to_html",
]
