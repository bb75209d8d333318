# SPDX-License-Identifier: Apache-2.0
"""`python -m atp_sidecar`."""

from atp_sidecar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
