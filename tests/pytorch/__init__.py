# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own distributed tests, and ours of the same kind, on gloo and on atp in one environment."""
