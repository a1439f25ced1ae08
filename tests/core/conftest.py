"""Settings of the core's tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # looptime's plugin makes an event loop before each sync test and never closes it: a ResourceWarning, that is an
    # error, in whatever test is collected. The tests use its loop through `spectool_core.testing`, not the plugin.
    plugin = config.pluginmanager.get_plugin("looptime_plugin")
    if plugin is not None:
        config.pluginmanager.unregister(plugin)
