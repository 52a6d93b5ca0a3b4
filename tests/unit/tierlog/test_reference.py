"""What docs/reference says is what the tables say."""

import runpy
from pathlib import Path

from api.http.metric_table import METRICS

GENERATE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "generate.py"))


def test_the_reference_is_up_to_date():
    assert GENERATE["main"](["--check"]) == 0


def test_every_command_and_metric_is_in_the_reference():
    commands = GENERATE["commands_page"]()
    for heading in ("tierlog serve", "tierlog topic create", "tierlog storage verify"):
        assert f"## {heading}\n" in commands
    assert "`--timestamp`" in commands
    metrics = GENERATE["metrics_page"]()
    assert metrics.count("`tierlog_") == len(METRICS)


def test_every_setting_is_in_the_reference():
    page = GENERATE["settings_page"]()
    assert "`--retention-check-interval` (seconds)" in page
    assert page.count("TIERLOG_") > 40
    assert "`segment.bytes`" in GENERATE["topic_settings_page"]()
