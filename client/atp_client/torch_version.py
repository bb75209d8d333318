# SPDX-License-Identifier: Apache-2.0
"""The version of torch that the trainer has."""

import torch

VERSION = tuple(int(part) for part in str(torch.__version__).split(".")[:2])
"""Major and minor: (2, 15)."""
