"""The type of a value of a topic's configuration, in JSON and in memory."""

from __future__ import annotations

ConfigValue = int | float | bool | str
