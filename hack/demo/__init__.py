# SPDX-License-Identifier: Apache-2.0
"""``make demo``: from a checkout to a model trained through in-network aggregation, on one machine."""
