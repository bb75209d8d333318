# SPDX-License-Identifier: Apache-2.0
"""``make clean-demo``: remove what the demo made, from a user's own cluster or the local cluster as a whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from localcluster import cluster, images, paths, versions

from .kube import connect

ROOT = Path(__file__).resolve().parent.parent.parent
CRDS = ["atpjobs.atp.dev", "atpswitches.atp.dev", "atptenantquotas.atp.dev"]


def everything() -> None:
    """Undo ``make demo``. With ATP_KUBECONTEXT: jobs, release, definitions and namespaces of that cluster."""
    here = paths.current()
    if context := os.environ.get("ATP_KUBECONTEXT", ""):
        kube = connect(versions.bin_dir(here), here.kubeconfig, context)
        kube.ctl("delete", "namespace", "atp-demo", "--ignore-not-found", timeout=180)
        kube.charts("uninstall", "atp", "-n", "atp-system", "--ignore-not-found", "--wait")
        kube.ctl("delete", "crd", *CRDS, "--ignore-not-found", timeout=120)
        kube.ctl("delete", "namespace", "atp-system", "--ignore-not-found", timeout=120)
    else:
        cluster.down(here, purge=True)
        images.purge(here)  # root's, unlike the rest of the cache
        if here.cache.exists():
            shutil.rmtree(here.cache)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    print("removed")
