"""Known vulnerabilities in what is installed, as PyPI's advisories say: part of `make check`.

A finding fails. What the advisories could not be asked about (no network, a mirror without them) is
counted and said, and does not: a laptop on a train must still be able to run the checks.
"""

import json
import subprocess
import sys


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", "--skip-editable", "--format", "json"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    if not ran.stdout:
        reason = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else "no answer"
        print(f"audit: nothing could be audited: {reason}")
        return 0
    packages = json.loads(ran.stdout)["dependencies"]
    asked = [package for package in packages if "vulns" in package]
    for package in asked:
        for found in package["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no release yet"
            print(
                f"audit: {package['name']} {package['version']}: {found['id']}; mended in {fixed}"
            )
    print(f"audit: {len(asked)} packages audited, {len(packages) - len(asked)} without an answer")
    return 1 if any(package["vulns"] for package in asked) else 0


if __name__ == "__main__":
    raise SystemExit(main())
