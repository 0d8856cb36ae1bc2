"""Time as one arm lives it: it passes while the arm computes, jumps over waiting, and stands while others
run.
"""

from __future__ import annotations

import time


class ArmClock:
    """Seconds since the arm began. Arms can so be measured in turns, under the same conditions of the
    machine.
    """

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._resumed: float | None = None

    def __call__(self) -> float:
        """The arm's present time."""
        running = time.perf_counter() - self._resumed if self._resumed is not None else 0.0
        return self._passed_s + running

    def resume(self) -> None:
        """The arm computes from now on."""
        self._resumed = time.perf_counter()

    def pause(self) -> None:
        """The arm's time stands still."""
        self._passed_s = self()
        self._resumed = None

    def skip_to(self, moment: float) -> None:
        """Nothing happens before `moment`: be there."""
        self._passed_s += max(0.0, moment - self())
