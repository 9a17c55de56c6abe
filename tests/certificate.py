"""A self-signed certificate for 127.0.0.1, made for one run of tests."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, *alpn: str) -> tuple[ssl.SSLContext, Path]:
    """The server's side, and the file by which a client may trust it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl binary to make a certificate")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = (
        f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        f"-subj /CN=engine -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context, certificate
