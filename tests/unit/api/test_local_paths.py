from pathlib import Path

import pytest

from tierlog.api.http.problems import path_shortener


@pytest.mark.parametrize(
    ("data_dir", "text", "shown"),
    [
        ("/srv/my lab/data", "/srv/my lab/data/t-0/00.log: bad", "t-0/00.log: bad"),
        ("/srv/my lab/data", "'/srv/my lab/data/t-0/00.log'", "'t-0/00.log'"),
        ("/srv/my lab/data", "in /srv/my lab/data/t-0.diverged-3", "in data/t-0.diverged-3"),
        ("/srv/my lab/data", "data folder /srv/my lab/data: full", "data folder data: full"),
        ("/srv/my lab/data", "/var/log/x/y: bad", "x/y: bad"),
        ("/data", "/data/t-0: bad", "data/t-0: bad"),
        ("/data", "file:///data/bucket: away", "file:///data/bucket: away"),
        ("data", "data/t-0/00.log and /srv/a/b/c", "data/t-0/00.log and b/c"),
    ],
)
def test_the_place_of_the_data_folder_is_removed_from_a_text(data_dir, text, shown):
    assert path_shortener(Path(data_dir))(text) == shown
