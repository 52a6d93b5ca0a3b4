"""Certificates made by openssl: a server's for this machine, an authority, and what that signs."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl to make a certificate"
)


def make_certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """The certificate, which is its own authority, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-keyout", key, "-out", certificate]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def make_authority(folder: Path, name: str = "authority") -> tuple[Path, Path]:
    """The certificate and the key of an authority."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-keyout", key, "-out", certificate, "-subj", f"/CN={name}"]
    command += ["-addext", "keyUsage=critical,keyCertSign"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def make_signed(authority: tuple[Path, Path], name: str, *, names: str) -> tuple[Path, Path]:
    """A certificate that the authority signs, for `names` as in IP:127.0.0.1, and its key."""
    ca, ca_key = authority
    certificate, key = ca.with_name(f"{name}.pem"), ca.with_name(f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-keyout", key, "-out", certificate, "-subj", f"/CN={name}"]
    command += ["-CA", ca, "-CAkey", ca_key, "-addext", f"subjectAltName={names}"]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
