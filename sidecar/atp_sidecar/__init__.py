# SPDX-License-Identifier: Apache-2.0
"""The ATP sidecar: runs the ATP transport of one pod and serves it to the trainer over a unix socket."""

__version__ = "0.1.0"
