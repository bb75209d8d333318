# SPDX-License-Identifier: Apache-2.0
"""Runs one of our own commands as root through sudo, for a caller who is not.

Only the steps that need it (containers, mounts, network) run as root; the Go builds run as the user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from .errors import ClusterError
from .paths import HACK, Paths

_PASSED = ("PATH", "LANG", "ATP_DEBIAN_MIRROR", "ATP_KUBECONTEXT")
_PASSED_PREFIXES = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def needed() -> bool:
    """True if this process is not root."""
    return os.getuid() != 0


def argv(args: Sequence[str], paths: Paths, env: Mapping[str, str]) -> list[str]:
    """The sudo command line. sudo drops the environment, so what matters is passed by name."""
    passed = {k: v for k, v in env.items() if k in _PASSED or k.startswith(_PASSED_PREFIXES)}
    # A user's PATH often lacks the folders of nft and ip.
    passed["PATH"] = f"{env.get('PATH', '/usr/bin:/bin')}:/usr/local/sbin:/usr/sbin:/sbin"
    passed |= {"ATP_CACHE": str(paths.cache), "ATP_CLUSTER_STATE": str(paths.state)}
    settings = [f"{key}={value}" for key, value in sorted(passed.items())]
    return ["sudo", "env", *settings, sys.executable, str(HACK / "atp-cluster"), *args]


def run(args: Sequence[str], paths: Paths) -> str:
    """Runs `atp-cluster ARGS` as root and returns its standard output; its messages go to the terminal.

    Raises ClusterError when there is no sudo, or when the command fails (it has said why by then).
    """
    if shutil.which("sudo") is None:
        raise ClusterError(f"`atp-cluster {args[0]}` needs root (containers, mounts, network), and there is no sudo")
    result = subprocess.run(argv(args, paths, os.environ), stdout=subprocess.PIPE, text=True)
    if result.returncode != 0:
        raise ClusterError(f"`atp-cluster {' '.join(args)}` failed as root, see above")
    return result.stdout
