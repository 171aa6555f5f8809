"""Most tests are about the schedule of measurements: they leave the one before training to those that ask for it."""

import pytest

from lightning_taskinfo.callbacks.probe import Probe


@pytest.fixture(autouse=True)
def schedule_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure at the start only in modules that say ``MEASURED_AT_START = True``."""
    if not getattr(request.module, "MEASURED_AT_START", False):
        monkeypatch.setattr(Probe, "default_at_start", False)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes draw nothing for their loggers, as where matplotlib is not installed: the tables are written."""
    monkeypatch.setattr("lightning_taskinfo.callbacks.probe.find_spec", lambda name: None)
