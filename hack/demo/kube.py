# SPDX-License-Identifier: Apache-2.0
"""kubectl and helm against one context, as a person would call them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CommandFailed(Exception):
    """A command failed; the text says which one and what it printed."""


@dataclass(frozen=True)
class Kube:
    """Programs, kubeconfig and context of one cluster. ``context`` empty: the kubeconfig's own."""

    kubectl: str
    helm: str
    kubeconfig: str
    context: str = ""

    def _run(self, argv: list[str], stdin: str | None, timeout: float) -> str:
        env = {**os.environ, **({"KUBECONFIG": self.kubeconfig} if self.kubeconfig else {})}
        try:
            done = subprocess.run(
                argv, input=stdin, env=env, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{' '.join(argv)}: no answer in {timeout:.0f} s") from None
        if done.returncode != 0:
            raise CommandFailed(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def ctl(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        """Run kubectl; return its output. Raises CommandFailed."""
        context = ["--context", self.context] if self.context else []
        return self._run([self.kubectl, *context, *args], stdin, timeout)

    def charts(self, *args: str, timeout: float = 300) -> str:
        """Run helm; return its output. Raises CommandFailed."""
        context = ["--kube-context", self.context] if self.context else []
        return self._run([self.helm, *context, *args], None, timeout)

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        """Return the object, or None when there is none."""
        where = ["-n", namespace] if namespace else []
        text = self.ctl("get", kind, name, *where, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        text = self.ctl("get", kind, "-n", namespace, "-l", selector, "-o", "json")
        items: list[dict[str, Any]] = json.loads(text)["items"]
        return items

    def logs(self, pod: str, namespace: str, container: str) -> str:
        """Return the container's log so far; empty while it has not started."""
        try:
            return self.ctl("logs", pod, "-n", namespace, "-c", container)
        except CommandFailed:
            return ""

    def pod_http(self, pod: str, namespace: str, port: int, path: str) -> str:
        """Read an HTTP path of a pod through the API server; empty when it does not answer."""
        try:
            return self.ctl("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}", timeout=10)
        except CommandFailed:
            return ""


def connect(local_bin: Path, local_kubeconfig: Path, context: str) -> Kube:
    """The user's own cluster when ``context`` is set, otherwise the local one.

    Raises:
        CommandFailed: the context does not exist or its cluster does not answer.
    """
    kubectl, helm = local_bin / "kubectl", local_bin / "helm"
    if not context:
        return Kube(str(kubectl), str(helm), str(local_kubeconfig))
    kube = Kube(
        str(kubectl) if kubectl.exists() else "kubectl",
        str(helm) if helm.exists() else "helm",
        os.environ.get("KUBECONFIG", ""),
        context,
    )
    kube.ctl("version", timeout=20)
    return kube
