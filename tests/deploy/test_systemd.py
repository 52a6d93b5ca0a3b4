"""The unit, as systemd itself judges it."""

import re
import shutil
import subprocess

import pytest

from tests.fakes.command_line import ROOT

UNIT = ROOT / "deploy/systemd/tierlog.service"


@pytest.fixture
def unit(tmp_path):
    """With a program that is there: systemd looks for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/tierlog/bin/tierlog", "/bin/true"))
    return copy


def test_systemd_has_nothing_to_say(unit):
    said = subprocess.run(
        ["systemd-analyze", "verify", unit], check=True, capture_output=True, text=True
    )
    assert UNIT.name not in said.stderr


def test_its_exposure_is_low(unit):
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--no-pager",
        "--threshold=20",
        unit,
    ]
    judged = subprocess.run(command, check=False, capture_output=True, text=True)
    if "unrecognized option" in judged.stderr:
        pytest.skip("needs systemd 250 or newer")
    assert judged.returncode == 0, judged.stdout[-400:]


def test_a_wrong_setting_is_not_tried_again():
    assert re.search(r"^RestartPreventExitStatus=2$", UNIT.read_text(), re.M)
