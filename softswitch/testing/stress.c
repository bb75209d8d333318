/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Random packets through the native core, built with the address and undefined-behaviour sanitizers (make sanitize). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "atp_control.h"

#define STRESS_AGGREGATORS 16u
#define STRESS_PACKETS 200000u
#define STRESS_BYTES (ATP_HEADER_BYTES + 4 * ATP_VALUES_JUMBO + 8)

static uint64_t random_state = 88172645463325252ull;

static uint32_t random32(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static void must(int result, const char *what) {
    if (result == 0)
        return;
    fprintf(stderr, "stress: %s returned %d\n", what, result);
    exit(1);
}

/* Reads all it is given, so that a length or pointer out of bounds shows. */
static void emit(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length, int ecn) {
    uint64_t *sum = context;

    for (size_t i = 0; i < length; i++)
        *sum += payload[i];
    *sum += egress_port + dst_ip + (uint32_t)ecn;
}

static void tables(struct atp_switch *sw, uint8_t job_id, uint32_t values) {
    const struct atp_job_config job = {.values = values,
                                       .full0 = random32() & 1 ? 0xf : 0xffffffffu,
                                       .full1 = random32() & 1 ? 0 : 0x7,
                                       .group = job_id,
                                       .region_count = 2,
                                       .region = {{0, 4}, {8, STRESS_AGGREGATORS - 8}}};
    struct atp_replica replicas[64];

    must(atp_switch_set_job(sw, job_id, &job), "set_job");
    for (uint32_t i = 0; i < 32; i++) {
        const struct atp_admission_key at0 = {.port = 1, .bitmap = 1u << i, .job_id = job_id};
        const struct atp_admission_key at1 = {.port = 1, .bitmap = 1u << i, .job_id = job_id, .edge = 1};
        const struct atp_transit_key way = {.port = 2, .bitmap1 = 1u << i, .job_id = job_id};
        must(atp_switch_set_admission(sw, &at0), "set_admission");
        must(atp_switch_set_admission(sw, &at1), "set_admission");
        must(atp_switch_set_transit(sw, &way, 0xff), "set_transit");
    }
    must(atp_switch_set_ps_port(sw, job_id, 3), "set_ps_port");
    memset(replicas, 0, sizeof(replicas));
    for (uint32_t i = 0; i < 64; i++)
        replicas[i].port = i + 1;
    must(atp_switch_set_group(sw, job_id, replicas, 64), "set_group");
    must(atp_switch_set_port_rate(sw, 3, 1000000000, 3000), "set_port_rate");
}

static size_t packet(uint8_t *payload) {
    static const uint32_t profiles[] = {ATP_VALUES_BASE, ATP_VALUES_LARGE, ATP_VALUES_JUMBO};
    uint32_t job_id = random32() % 5;
    size_t length = ATP_HEADER_BYTES + 4 * profiles[job_id % 3];
    uint32_t flags = (random32() & 0x003f0000u & random32()) | (random32() % 20);
    uint32_t words[4] = {job_id << 24 | random32() % 3, 1u << random32() % 5, 1u << random32() % 4, flags};
    uint32_t small = random32() & 1;

    for (uint32_t i = 0; i < 4; i++) {
        payload[4 * i] = (uint8_t)(words[i] >> 24);
        payload[4 * i + 1] = (uint8_t)(words[i] >> 16);
        payload[4 * i + 2] = (uint8_t)(words[i] >> 8);
        payload[4 * i + 3] = (uint8_t)words[i];
    }
    for (size_t i = ATP_HEADER_BYTES; i < length; i++)
        payload[i] = small && i % 4 == 0 ? 0 : (uint8_t)random32();
    return random32() % 50 == 0 ? random32() % STRESS_BYTES : length;
}

int main(void) {
    const struct atp_switch_options options = {.aggregators = STRESS_AGGREGATORS, .values = ATP_VALUES_JUMBO};
    static int32_t values[ATP_VALUES_JUMBO];
    struct atp_aggregator_state state;
    struct atp_switch *sw;
    uint64_t now_ns = 1000000000;
    uint64_t sum = 0;

    must(atp_switch_open_native(&options, &sw), "open_native");
    tables(sw, 1, ATP_VALUES_LARGE);
    tables(sw, 2, ATP_VALUES_JUMBO);
    tables(sw, 3, ATP_VALUES_BASE);
    for (uint32_t i = 0; i < STRESS_PACKETS; i++) {
        uint8_t buffer[STRESS_BYTES];
        size_t length = packet(buffer);
        uint8_t *exact = malloc(length ? length : 1); /* so that one byte too far is found */

        if (exact == NULL)
            return 1;
        memcpy(exact, buffer, length);
        now_ns += random32() % 4000000;
        must(atp_switch_process(sw, 1 + random32() % 3, 9, random32() % 30 == 0, exact, length, now_ns, emit, &sum),
             "process");
        free(exact);
        if (i % 64 == 0)
            must(atp_switch_read_aggregator(sw, random32() % STRESS_AGGREGATORS, &state, values), "read_aggregator");
        if (i % 5000 == 4999) {
            must(atp_switch_delete_job(sw, 1), "delete_job");
            if (atp_switch_occupancy(sw, 1) != 0)
                return 1;
            tables(sw, 1, ATP_VALUES_LARGE);
            if (atp_switch_sweep(sw) < 0)
                return 1;
        }
    }
    atp_switch_close(sw);
    printf("stress: %u packets, checksum %llu\n", STRESS_PACKETS, (unsigned long long)sum);
    return 0;
}
