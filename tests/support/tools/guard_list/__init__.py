"""The guards of docs/evidence/guards.md: how each is taken out of the code, and what fails then."""

from __future__ import annotations

from tests.support.tools.guard_list.guard import Guard
from tests.support.tools.guard_list.of_exports import EXPORTED
from tests.support.tools.guard_list.of_faults import (
    DISKS,
    FORKED,
    HANGING,
    LATE,
    SILENT,
    SMALL,
    TABLES,
    TWO_JOBS,
    UPGRADED,
    WRONG_CLOCKS,
)
from tests.support.tools.guard_list.of_manager import (
    DECIDING,
    ENDING,
    KEEPING,
    RESUMING,
    SPACE,
)
from tests.support.tools.guard_list.of_published import PUBLISHED
from tests.support.tools.guard_list.of_repair import (
    MENDING,
    REPAIR,
)

__all__ = ["GUARDS", "Guard"]

GUARDS = [
    *(*KEEPING, *RESUMING, *DECIDING, *SPACE, *ENDING),
    *(*REPAIR, *MENDING, *PUBLISHED, *EXPORTED),
    *(
        *TABLES,
        *SILENT,
        *HANGING,
        *DISKS,
        *LATE,
        *TWO_JOBS,
        *WRONG_CLOCKS,
        *SMALL,
        *FORKED,
        *UPGRADED,
    ),
]
