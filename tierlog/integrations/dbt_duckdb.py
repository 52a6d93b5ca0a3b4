"""Topics as sources of a dbt project on DuckDB, whose profile names this module as a plugin:

    plugins:
      - module: tierlog.integrations.dbt_duckdb
        config: {tierlog: {store: "s3://bucket/prefix", tier: cold}}

A source with `plugin: dbt_duckdb` is the topic that its `topic` names, by default its identifier.
It is a view: each model that reads it scans the topic, of the offsets that existed when dbt loaded
it.
"""

from __future__ import annotations

from typing import Any

from dbt.adapters.duckdb.plugins import BasePlugin
from dbt.adapters.duckdb.utils import SourceConfig

from tierlog.spark_reader.arrow_dataset import TopicDataset, dataset


class Plugin(BasePlugin):  # type: ignore[misc]
    """`tierlog`, in the plugin's configuration and in a source's, has arguments of
    `tierlog.dataset`; those of the source win.
    """

    def initialize(self, plugin_config: dict[str, Any]) -> None:
        self._options = dict(plugin_config.get("tierlog", {}))

    def load(self, source_config: SourceConfig) -> TopicDataset:
        options = self._options | source_config.get("tierlog", {})
        return dataset(source_config.get("topic", source_config.identifier), **options)

    def default_materialization(self) -> str:
        return "view"
