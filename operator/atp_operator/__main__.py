# SPDX-License-Identifier: Apache-2.0
"""`python -m atp_operator`."""

import sys

from .cli import main

sys.exit(main())
