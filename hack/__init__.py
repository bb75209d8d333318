# SPDX-License-Identifier: Apache-2.0
"""Developer tooling: the local cluster and the image builds. Standard library only."""
