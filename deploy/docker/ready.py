"""Exit 0 when a URL answers 200: the broker's health check in the image, which has no curl.

python ready.py http://127.0.0.1:8640/readyz
"""

from __future__ import annotations

import sys
import urllib.request


def answers(url: str) -> bool:
    """Whether a GET of `url` is answered with 200 within three seconds."""
    assert url.startswith("http://127.0.0.1:"), "a health check asks its own container"
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:  # noqa: S310 - loopback, see above
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(0 if answers(sys.argv[1]) else 1)
