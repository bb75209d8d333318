# SPDX-License-Identifier: Apache-2.0
"""The agent of one ATP switch: the operator's desired state in, P4Runtime out."""

__version__ = "0.1.0"
