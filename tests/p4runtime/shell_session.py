# SPDX-License-Identifier: Apache-2.0
# Run by test_shell.py with the interpreter of .venv-p4shell: python shell_session.py ADDRESS P4INFO PROGRAM PORT PORT
# A session of p4runtime-shell as a network engineer would type it; prints what it sees as JSON.
import json
import sys

import p4runtime_sh.shell as sh
from p4runtime_sh.p4runtime import P4RuntimeWriteException

address, p4info, program, first_port, second_port = sys.argv[1:]
seen: dict[str, object] = {}
sh.setup(device_id=1, grpc_addr=address, election_id=(0, 1), config=sh.FwdPipeConfig(p4info, program), verbose=False)
try:
    seen["tables"] = sorted(table.name for table in sh.P4Objects(sh.P4Type.table))

    job = sh.TableEntry("AtpIngress.job")(action="AtpIngress.set_job")
    job.match["job_id"] = "3"
    job.action["values"] = "62"
    job.action["full0"] = "3"
    job.action["full1"] = "0"
    job.action["group"] = "7"
    job.insert()
    region = sh.TableEntry("AtpIngress.region")(action="AtpIngress.in_region")
    region.match["job_id"] = "3"
    region.match["aggregator_index"] = "0..127"
    region.priority = 1
    region.insert()
    admission = sh.TableEntry("AtpIngress.admission")(action="AtpIngress.admit")
    admission.match["job_id"] = "3"
    admission.match["ingress_port"] = first_port
    admission.match["edge"] = "0"
    admission.match["bitmap"] = "1"
    admission.insert()
    group = sh.MulticastGroupEntry(7)
    group.add(int(first_port), 1)
    group.add(int(second_port), 2)
    group.insert()

    seen["jobs"] = [
        {param.param_id: int.from_bytes(param.value, "big") for param in entry.msg().action.action.params}
        for entry in sh.TableEntry("AtpIngress.job").read()
    ]
    seen["regions"] = [
        [int.from_bytes(match.range.low, "big"), int.from_bytes(match.range.high, "big")]
        for entry in sh.TableEntry("AtpIngress.region").read()
        for match in entry.msg().match
        if match.HasField("range")
    ]
    seen["groups"] = [
        sorted((replica.egress_port, replica.instance) for replica in found.replicas)
        for found in sh.MulticastGroupEntry(7).read()
    ]
    counter = sh.CounterEntry("AtpIngress.aggregated")
    counter.index = 3
    seen["aggregated"] = [cell.packet_count for cell in counter.read()]
    counter.packet_count = 17
    counter.modify()
    seen["counted"] = [cell.packet_count for cell in counter.read()]
    every = sh.CounterEntry("AtpIngress.aggregated")
    seen["cells"] = {cell.index: cell.packet_count for cell in every.read() if cell.packet_count}
    group.add(int(second_port), 3)
    group.modify()
    seen["grown"] = [
        sorted(replica.instance for replica in found.replicas) for found in sh.MulticastGroupEntry(7).read()
    ]
    try:
        job.insert()
    except P4RuntimeWriteException as error:
        seen["twice"] = str(error)
    job.action["full0"] = "7"
    job.modify()
    seen["modified"] = [
        int.from_bytes(param.value, "big")
        for entry in sh.TableEntry("AtpIngress.job").read()
        for param in entry.msg().action.action.params
        if param.param_id == 2
    ]
    for entry in (admission, job, region, group):
        entry.delete()
    seen["left"] = len(list(sh.TableEntry("AtpIngress.job").read()))
finally:
    sh.teardown()
print(json.dumps(seen))
