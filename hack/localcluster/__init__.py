# SPDX-License-Identifier: Apache-2.0
"""A one-node Kubernetes cluster made of plain processes, and the container images it runs.

No Docker, no image registry: the Kubernetes binaries are built from their Go modules, the node's
container runtime is Debian's containerd, and images are built here and imported.  Only the standard
library is used, so it runs before any virtual environment exists.
"""
