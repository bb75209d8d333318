# SPDX-License-Identifier: Apache-2.0
"""P4Runtime server in front of the ATP software switch."""

__version__ = "0.1.0"
