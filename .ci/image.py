"""Build the broker's image without an engine, start it, measure it: `sudo python .ci/image.py`.

buildah runs the Dockerfile's own steps in a chroot. Where no registry is reached, what Debian's
packages give stands in for the Python image: steps and files are the real ones, the base is not.
Needs root, buildah, debootstrap, a mirror of Debian, and a machine that lets a chroot run; exit 77
where one of them is missing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "deploy/docker"
LIMIT_MB = 120
CA = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(  # noqa: S603
        command, check=False, capture_output=True, text=True, env=os.environ | (env or {})
    )
    if ran.returncode:
        sys.exit(f"image: {' '.join(map(str, command))}\n{ran.stdout[-4000:]}{ran.stderr[-4000:]}")
    return ran.stdout.strip()


def base_of(dockerfile: str) -> tuple[str, str]:
    """The image that the last stage stands on, and its Debian."""
    tag = re.search(r"^ARG PYTHON=(\S+)$", dockerfile, re.M)
    assert tag, "the Dockerfile names its Python"
    return f"docker.io/library/python:{tag[1]}", tag[1].rpartition("-")[2]


def make_base(buildah: tuple[str | Path, ...], folder: Path) -> str:
    """A stand-in with the name of the Python image: Debian's own Python at the usual place."""
    name, debian = base_of((DOCKER / "Dockerfile").read_text())
    root = folder / "base"
    run("debootstrap", "--variant=minbase", "--include=python3,python3-venv", debian, root)
    for program in ("python", "python3"):
        (root / "usr/local/bin" / program).symlink_to("/usr/bin/python3")
    for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(root / waste, ignore_errors=True)
    container = run(*buildah, "from", "scratch")
    run(*buildah, "add", container, root, "/")
    run(*buildah, "commit", "--rm", container, name)
    shutil.rmtree(root)
    return name


def package_settings() -> list[str]:
    """The index that this machine's pip uses, for the steps that install."""
    given = {name: os.environ[name] for name in os.environ if name.startswith("PIP_")}
    given |= {"PIP_CERT": str(CA)} if CA.exists() else {}
    given.pop("PIP_FIND_LINKS", None)
    mounts = [path for path in (CA, Path("/etc/pip.conf")) if path.exists()]
    return [
        *(f"--env={name}={value}" for name, value in given.items()),
        *(f"--volume={path}:{path}:ro" for path in mounts),
    ]


def compressed_mb(buildah: tuple[str | Path, ...], image: str, folder: Path) -> float:
    folder.mkdir()
    run(*buildah, "push", image, f"oci:{folder}/oci")
    return (
        sum(path.stat().st_size for path in (folder / "oci/blobs").rglob("*") if path.is_file())
        / 1e6
    )


STARTS = """
set -e
! touch /opt/tierlog/written 2>/dev/null
tierlog serve --data-dir /data/log --store file:///data/bucket --listen 127.0.0.1:8640 &
for _ in $(seq 300); do
  python /opt/tierlog/ready.py http://127.0.0.1:8640/readyz && break
  kill -0 $!
  python -c 'import time; time.sleep(0.1)'
done
python /opt/tierlog/ready.py http://127.0.0.1:8640/healthz
tierlog topic create hello >/data/out
echo hello | tierlog produce hello >/data/out
test "$(tierlog consume hello)" = hello
kill $!
wait $!
id -u
"""


def main() -> int:
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"image: not built: it needs root and {' and '.join(missing) or 'nothing more'}")
        return 77
    with tempfile.TemporaryDirectory(prefix="tierlog-image-") as name:
        folder = Path(name)
        storage = ("--root", folder / "storage", "--runroot", folder / "run")
        buildah = ("buildah", *storage, "--storage-driver", "vfs")
        chroot = ("--isolation", "chroot")
        try:
            base = make_base(buildah, folder)
            bare = run(*buildah, "from", "--pull-never", base)
            run(*buildah, "run", *chroot, bare, "--", "python", "--version")
        except SystemExit as error:
            print(f"not built, since nothing runs in a chroot here: {error}")
            return 77
        ignored = ("--ignorefile", DOCKER / "Dockerfile.dockerignore")
        build = (*chroot, "--format", "docker", "--pull-never", *ignored, *package_settings())
        run(*buildah, "build", *build, "-f", DOCKER / "Dockerfile", "-t", "tierlog", ROOT)
        container = run(*buildah, "from", "--pull-never", "tierlog")
        user = run(*buildah, "run", *chroot, container, "--", "sh", "-c", STARTS).splitlines()[-1]
        assert user == "10001", user
        whole = compressed_mb(buildah, "tierlog", folder / "whole")
        stood_on = compressed_mb(buildah, base, folder / "base")
        print(f"image: {whole:.0f} MB compressed, {whole - stood_on:.0f} of them ours")
        return 1 if whole > LIMIT_MB else 0


if __name__ == "__main__":
    raise SystemExit(main())
