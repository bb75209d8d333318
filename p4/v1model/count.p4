/* SPDX-License-Identifier: Apache-2.0 */
/* Which events each counter counts; Tofino publishes the events themselves (docs/p4.md). In the ingress control's apply. */
            if (meta.verdict == V_ALLOCATED || meta.verdict == V_TAKEOVER ||
                meta.verdict == V_ALLOCATED_DONE || meta.verdict == V_TAKEOVER_DONE) {
                allocated.count(job_index);
            }
            if (meta.verdict == V_ALLOCATED || meta.verdict == V_TAKEOVER || meta.verdict == V_ALLOCATED_DONE || meta.verdict == V_TAKEOVER_DONE ||
                meta.verdict == V_ADDED || meta.verdict == V_COMPLETED || meta.verdict == V_PARTIAL_ADDED || meta.verdict == V_PARTIAL_DONE) {
                aggregated.count(job_index);
            }
            if (meta.verdict == V_ALLOCATED_DONE || meta.verdict == V_TAKEOVER_DONE ||
                meta.verdict == V_COMPLETED || meta.verdict == V_PARTIAL_DONE) {
                completed.count(job_index);
            }
            if (meta.verdict == V_COLLISION) {
                collisions.count(job_index);
            }
            if (meta.verdict == V_DUPLICATE) {
                duplicates.count(job_index);
            }
            if (meta.verdict == V_REEMITTED) {
                reemitted.count(job_index);
            }
            if (meta.verdict == V_TAKEOVER || meta.verdict == V_TAKEOVER_DONE || meta.verdict == V_RESEND_STALE) {
                stale_takeovers.count(job_index);
            }
            if (meta.verdict == V_PARTIAL || meta.verdict == V_PARTIAL_ADDED || meta.verdict == V_PARTIAL_DONE) {
                resend_partials.count(job_index);
            }
            if (meta.verdict == V_RESEND_PASSED || meta.verdict == V_RESEND_STALE) {
                resend_passed.count(job_index);
            }
            if (meta.verdict == V_RELEASED || meta.verdict == V_RELEASED_ONE) {
                released.count(job_index);
            }
            if (meta.verdict == V_RELEASED || meta.verdict == V_ACK) {
                acks.count(job_index);
            }
            if (meta.verdict == V_RAW) {
                passed_raw_float.count(job_index);
            }
            if (meta.verdict == V_TRANSIT) {
                passed_transit.count(job_index);
            }
            if (meta.verdict == V_UNKNOWN) {
                passed_unknown_job.count(job_index);
            }
            if (meta.verdict == V_SHORT) {
                rejected_short.count(job_index);
            }
            if (meta.verdict == V_LENGTH) {
                rejected_length.count(job_index);
            }
            if (meta.verdict == V_BIT) {
                rejected_bit.count(job_index);
            }
            if (meta.verdict == V_INDEX) {
                rejected_index.count(job_index);
            }
            if (meta.verdict == V_ACK_SOURCE) {
                rejected_ack_source.count(job_index);
            }
            if (meta.verdict != V_NONE) {
                bytes_in.count(job_index);
            }
