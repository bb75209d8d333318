# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS from a directory with ca.crt, tls.crt and tls.key, read again when the files change."""

from __future__ import annotations

from pathlib import Path

import grpc

FILES = ("ca.crt", "tls.crt", "tls.key")


def _read(directory: Path) -> tuple[bytes, bytes, bytes]:
    authority, certificate, key = ((directory / name).read_bytes() for name in FILES)
    return authority, certificate, key


def _configuration(content: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    authority, certificate, key = content
    return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)


def server_credentials(directory: Path) -> grpc.ServerCredentials:
    """Credentials that refuse clients without a certificate of ca.crt, and follow renewed files.

    Raises OSError when a file is missing.
    """
    current = _read(directory)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal current
        try:
            content = _read(directory)
        except OSError:
            return None  # a renewal under way: keep the old ones
        if content == current:
            return None
        current = content
        return _configuration(content)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(current),
        fetch,  # type: ignore[arg-type]  # None, "keep the old one", is documented but not in the stubs
        require_client_authentication=True,
    )
