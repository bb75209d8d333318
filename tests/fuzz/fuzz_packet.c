/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One packet of any bytes against a switch in one of a few states. Byte 0: ingress port and IP mark, byte 1: what the
 * aggregators hold, byte 2: how the payload's length is made, then the payload. What leaves must obey the header's
 * rules.
 */
#include "fuzz.h"

#define AGGREGATORS 8u
#define JOB 1u
#define LARGE_JOB 2u
#define DST 0x0a000001u

static struct atp_switch *sw;

static void open_once(void) {
    const struct atp_switch_options options = {.aggregators = AGGREGATORS, .values = ATP_VALUES_LARGE};
    const struct atp_replica replicas[] = {{.port = PORT_WORKER0, .dst_ip = 11}, {.port = PORT_WORKER1, .dst_ip = 12}};

    if (sw != NULL)
        return;
    MUST(atp_switch_open_native(&options, &sw) == 0);
    for (uint8_t job = JOB; job <= LARGE_JOB; job++) {
        for (uint32_t bit = 0; bit < 32; bit++) {
            const struct atp_admission_key at0 = {.port = 1 + bit % 2, .bitmap = 1u << bit, .job_id = job};
            const struct atp_admission_key at1 = {.port = PORT_EDGE, .bitmap = 1u << bit, .job_id = job, .edge = 1};
            const struct atp_transit_key way = {.port = PORT_TRANSIT, .bitmap1 = 1u << bit, .job_id = job};
            MUST(atp_switch_set_admission(sw, &at0) == 0);
            MUST(atp_switch_set_admission(sw, &at1) == 0);
            MUST(atp_switch_set_transit(sw, &way, 0xff) == 0);
        }
        MUST(atp_switch_set_ps_port(sw, job, PORT_PS) == 0);
    }
    MUST(atp_switch_set_group(sw, 1, replicas, 2) == 0);
}

struct seen {
    const uint8_t *in;
    size_t length;
    uint32_t emissions;
    bool known;
};

static void emit(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length, int ecn) {
    struct seen *seen = context;
    const uint8_t *in = seen->in;
    uint32_t was, is;

    seen->emissions++;
    MUST(length == seen->length);
    is = be32(payload + 12);
    was = be32(in + 12);
    MUST((ecn != 0) == ((is & ATP_F_ECN) != 0));
    MUST(memcmp(payload, in, 4) == 0);
    if (!seen->known || was & (ATP_F_RAW | ATP_F_ACK)) {
        MUST(memcmp(payload, in, length) == 0); /* never changed on the way */
        MUST(!seen->known || was & ATP_F_ACK ? egress_port != PORT_PS : egress_port == PORT_PS);
        return;
    }
    MUST(egress_port == PORT_PS && dst_ip == DST);
    MUST(((is ^ was) & ~(ATP_F_EDGE | ATP_F_RESEND | ATP_F_COLLISION | ATP_F_ECN)) == 0);
    MUST((was & ~is) == 0); /* no flag is ever taken away */
    if (is & ~was & ATP_F_RESEND)
        MUST(is & ATP_F_COLLISION);
    if (is & ~was & ATP_F_COLLISION)
        MUST(is & ATP_F_RESEND && memcmp(payload + 4, in + 4, 8) == 0 &&
             memcmp(payload + 16, in + 16, length - 16) == 0);
    /* What goes on covers at least what came, at one level. */
    MUST((be32(in + 4) & ~be32(payload + 4)) == 0 && (be32(in + 8) & ~be32(payload + 8)) == 0);
    MUST(be32(in + 4) == be32(payload + 4) || be32(in + 8) == be32(payload + 8));
}

static void nothing(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length,
                    int ecn) {
    (void)context, (void)egress_port, (void)dst_ip, (void)payload, (void)length, (void)ecn;
}

static void fill(uint32_t key, uint32_t bit, uint32_t port, uint32_t flags, uint64_t now) {
    uint8_t packet[ATP_HEADER_BYTES + 4 * ATP_VALUES_BASE] = {0};

    put32(packet, key);
    put32(packet + 4, bit);
    put32(packet + 8, bit);
    put32(packet + 12, flags);
    for (uint32_t i = 0; i < ATP_VALUES_BASE; i++)
        put32(packet + 16 + 4 * i, i);
    MUST(atp_switch_process(sw, port, DST, 0, packet, sizeof(packet), now, nothing, NULL) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const size_t lengths[] = {0, ATP_HEADER_BYTES + 4 * ATP_VALUES_BASE,
                                     ATP_HEADER_BYTES + 4 * ATP_VALUES_LARGE};
    uint64_t before[3][ATP_COUNTERS], after[3][ATP_COUNTERS];
    struct seen seen = {0};
    uint64_t now = 1000000000;
    uint32_t key = JOB << 24;
    size_t length;
    uint8_t *in, *exact;
    uint64_t outcomes = 0;

    if (size < 3)
        return 0;
    open_once();
    for (uint8_t job = JOB; job <= LARGE_JOB; job++) {
        const struct atp_job_config config = {.values = job == JOB ? ATP_VALUES_BASE : ATP_VALUES_LARGE,
                                              .full0 = data[1] & 0x40 ? 0 : 0x3,
                                              .full1 = data[1] & 0x80 ? 0x3 : 0,
                                              .group = 1,
                                              .region_count = 2,
                                              .region = {{0, 2}, {4, 4}}};
        (void)atp_switch_delete_job(sw, job);
        MUST(atp_switch_set_job(sw, job, &config) == 0);
    }
    MUST(atp_switch_occupancy(sw, 0) == 0);
    switch (data[1] & 0x7) { /* aggregator 0 */
    case 1:
        fill(key, 1, PORT_WORKER0, 0, now);
        break;
    case 2:
        fill(key, 1, PORT_WORKER0, 0, now);
        fill(key, 2, PORT_WORKER1, ATP_F_ECN, now);
        break;
    case 3:
        fill(key | 77, 1, PORT_WORKER0, 0, now);
        break;
    case 4:
        fill(key, 1, PORT_WORKER0, 0, now);
        now += ATP_STALE_NS + 1;
        break;
    case 5:
        fill(key, 1, PORT_EDGE, ATP_F_EDGE, now);
        break;
    case 6:
        fill(key, 1, PORT_EDGE, ATP_F_EDGE, now);
        fill(key, 2, PORT_EDGE, ATP_F_EDGE, now);
        break;
    default:
        break;
    }
    length = lengths[data[2] % 3] ? lengths[data[2] % 3] : size - 3;
    in = calloc(1, length ? length : 1);
    exact = malloc(length ? length : 1); /* so that one byte too far is found */
    MUST(in != NULL && exact != NULL);
    memcpy(in, data + 3, size - 3 < length ? size - 3 : length);
    memcpy(exact, in, length);
    for (uint8_t job = 0; job < 3; job++)
        MUST(atp_switch_read_counters(sw, job, before[job]) == 0);
    seen.in = in;
    seen.length = length;
    seen.known = length >= 4 && (in[0] == JOB || in[0] == LARGE_JOB);
    MUST(atp_switch_process(sw, 1 + data[0] % 7, DST, data[0] >> 7, exact, length, now, emit, &seen) == 0);
    for (uint8_t job = 0; job < 3; job++) {
        MUST(atp_switch_read_counters(sw, job, after[job]) == 0);
        for (uint32_t i = 0; i < ATP_COUNTERS; i++)
            MUST(after[job][i] >= before[job][i] &&
                 (i == ATP_C_BYTES_IN || i == ATP_C_BYTES_OUT || after[job][i] <= before[job][i] + 1));
        outcomes += after[job][ATP_C_BYTES_IN] - before[job][ATP_C_BYTES_IN];
    }
    MUST(outcomes == length + 42);
    outcomes = 0;
    for (uint8_t job = 0; job < 3; job++)
        outcomes += after[job][ATP_C_BYTES_OUT] - before[job][ATP_C_BYTES_OUT];
    MUST(outcomes == seen.emissions * (length + 42));
    MUST(seen.emissions <= 2 && atp_switch_occupancy(sw, 0) <= 2);
    free(in);
    free(exact);
    return 0;
}
