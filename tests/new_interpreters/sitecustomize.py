"""Python imports this when an interpreter starts that a test has started: it sees the CPU that the test sees."""

from __future__ import annotations

from tests import cpus

cpus.install()
