// SPDX-License-Identifier: Apache-2.0
//! What either end asks of a datagram before it looks at what it says (docs/protocol.md, "Tags").

use crate::config::Config;
use crate::stats::Counters;
use crate::wire::Header;

/// Header and whole packet, without its tag; what is refused is counted. `known`: it comes from an address of this job.
pub(crate) fn open<'a>(
    config: &Config,
    counters: &mut Counters,
    known: bool,
    data: &'a [u8],
) -> Option<(Header, &'a [u8])> {
    let Some(header) = Header::unpack(data) else {
        counters.rejected_short += 1;
        return None;
    };
    if !known {
        counters.rejected_stranger += 1;
        return None;
    }
    if header.job_id != config.job_id {
        counters.rejected_job += 1;
        return None;
    }
    let Some(data) = (if header.raw_float { config.seal.open(data) } else { Some(data) }) else {
        counters.rejected_tag += 1;
        return None;
    };
    if data.len() != config.packet_bytes() {
        counters.rejected_length += 1;
        return None;
    }
    Some((header, data))
}
