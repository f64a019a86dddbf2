"""What all tests share."""

from __future__ import annotations

import os

# Read once, when torch loads: threads that wait at a barrier sleep, since tests share the cores with other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
