"""Fixtures for fault tests: those of the integration tests."""

from tests.integration.conftest import launch, module_launch

__all__ = ["launch", "module_launch"]
