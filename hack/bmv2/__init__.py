# SPDX-License-Identifier: Apache-2.0
"""bmv2 with the committed ATP program, and a training run with it in the middle (``make demo-bmv2``)."""
