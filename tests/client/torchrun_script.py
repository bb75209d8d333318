# SPDX-License-Identifier: Apache-2.0
"""What torchrun starts in test_torchrun.py: sums, and, in its first life, one rank that fails on the way."""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import atp_client


def main() -> None:
    """Prints a JSON line when it has summed, or why it could not."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    begin = time.monotonic()
    try:
        # Where torchrun has started the ranks again one after the other, one waits so long for a peer that is gone.
        dist.init_process_group("atp", timeout=timedelta(seconds=30))
    except atp_client.AtpError as error:
        seconds = time.monotonic() - begin
        print(json.dumps({"error": type(error).__name__, "text": str(error), "seconds": seconds}), flush=True)
        sys.exit(3)
    for step in range(6):
        tensor = torch.full((1000,), float(step))
        dist.all_reduce(tensor)
        assert (tensor == step * dist.get_world_size()).all()
        if "fail" in sys.argv and step == 3 and restarts == 0 and dist.get_rank() == 1:
            sys.exit(7)
    summed = {"rank": dist.get_rank(), "restarts": restarts, "epoch": atp_client.connect().epoch}
    print(json.dumps({**summed, "session": atp_client.connect().welcome.session}), flush=True)
    dist.destroy_process_group()


main()
