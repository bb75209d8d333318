# SPDX-License-Identifier: Apache-2.0
"""What the long-running programs of the control plane share: logs, health and metrics."""
