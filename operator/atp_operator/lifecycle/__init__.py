# SPDX-License-Identifier: Apache-2.0
"""One job's next step, from what is there now. Pure: the time is an argument, the result says what to do.

A step never assumes that an earlier one happened: it looks at status, pods and switches, so a restart of the operator
at any point changes nothing.
"""

from .plan import JobPlan, World, hold_back
from .queue import admit, put_off, waits_in_queue
from .step import step

__all__ = ["JobPlan", "World", "admit", "hold_back", "put_off", "step", "waits_in_queue"]
