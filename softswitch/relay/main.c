/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* atp-relay: the relay from a text file of tables, for a laptop without a control plane. See usage(). */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "atp_control.h"

#define LINE_MAX_BYTES 512

struct config {
    struct atp_switch_options options;
    uint32_t address;
    uint16_t port;
    struct atp_switch *sw;
    struct atp_replica replicas[ATP_REPLICAS_MAX];
    uint32_t replica_count;
};

static void usage(void) {
    fputs("usage: atp-relay FILE\n"
          "FILE has one entry a line, # starts a comment; numbers may be hexadecimal:\n"
          "  listen ADDRESS PORT                     address that workers and PS send to; first line\n"
          "  memory AGGREGATORS VALUES               VALUES is 62, 350 or 870; second line\n"
          "  job ID VALUES FULL0 FULL1 GROUP START SIZE\n"
          "  admission ID EDGE BITMAP ADDRESS        the worker at ADDRESS may set this bit\n"
          "  transit ID BITMAP1 MASK0 ADDRESS\n"
          "  ps ID ADDRESS                           ACKs come from here, gradients go here\n"
          "  group GROUP ADDRESS...                  the copies of an ACK\n",
          stderr);
}

static int parse_number(const char *word, uint32_t max, uint32_t *out) {
    unsigned long long value;
    char *end;

    if (word == NULL || *word == '\0' || *word == '-')
        return -EINVAL;
    errno = 0;
    value = strtoull(word, &end, 0);
    if (errno != 0 || *end != '\0' || value > max)
        return -EINVAL;
    *out = (uint32_t)value;
    return 0;
}

static int parse_address(const char *word, uint32_t *out) {
    struct in_addr address;

    if (word == NULL || inet_pton(AF_INET, word, &address) != 1)
        return -EINVAL;
    *out = ntohl(address.s_addr);
    return 0;
}

static char *next(char **rest) {
    return strtok_r(NULL, " \t\r\n", rest);
}

/* Numbers of a line, one for each maximum. */
static int parse_numbers(char **rest, const uint32_t *max, uint32_t *out, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (parse_number(next(rest), max[i], &out[i]) != 0)
            return -EINVAL;
    return 0;
}

static int line_memory(struct config *config, char **rest) {
    const uint32_t max[2] = {ATP_AGGREGATOR_INDEX_MAX + 1, ATP_VALUES_JUMBO};
    uint32_t n[2];

    if (parse_numbers(rest, max, n, 2) != 0 || config->sw != NULL)
        return -EINVAL;
    config->options.aggregators = n[0];
    config->options.values = n[1];
    return atp_switch_open_native(&config->options, &config->sw);
}

static int line_job(struct config *config, char **rest) {
    const uint32_t max[7] = {ATP_JOB_ID_MAX,
                             ATP_VALUES_JUMBO,
                             UINT32_MAX,
                             UINT32_MAX,
                             ATP_GROUPS - 1,
                             ATP_AGGREGATOR_INDEX_MAX,
                             ATP_AGGREGATOR_INDEX_MAX + 1};
    uint32_t n[7];

    if (parse_numbers(rest, max, n, 7) != 0)
        return -EINVAL;
    const struct atp_job_config job = {
        .values = n[1], .full0 = n[2], .full1 = n[3], .group = n[4], .region_count = 1, .region = {{n[5], n[6]}}};
    return atp_switch_set_job(config->sw, (uint8_t)n[0], &job);
}

static int line_admission(struct config *config, char **rest) {
    const uint32_t max[3] = {ATP_JOB_ID_MAX, 1, UINT32_MAX};
    uint32_t n[3], address;

    if (parse_numbers(rest, max, n, 3) != 0 || parse_address(next(rest), &address) != 0)
        return -EINVAL;
    const struct atp_admission_key key = {
        .port = address, .bitmap = n[2], .job_id = (uint8_t)n[0], .edge = (uint8_t)n[1]};
    return atp_switch_set_admission(config->sw, &key);
}

static int line_transit(struct config *config, char **rest) {
    const uint32_t max[3] = {ATP_JOB_ID_MAX, UINT32_MAX, UINT32_MAX};
    uint32_t n[3], address;

    if (parse_numbers(rest, max, n, 3) != 0 || parse_address(next(rest), &address) != 0)
        return -EINVAL;
    const struct atp_transit_key key = {.port = address, .bitmap1 = n[1], .job_id = (uint8_t)n[0]};
    return atp_switch_set_transit(config->sw, &key, n[2]);
}

static int line_ps(struct config *config, char **rest) {
    const uint32_t max[1] = {ATP_JOB_ID_MAX};
    uint32_t n[1], address;

    if (parse_numbers(rest, max, n, 1) != 0 || parse_address(next(rest), &address) != 0)
        return -EINVAL;
    return atp_switch_set_ps_port(config->sw, (uint8_t)n[0], address);
}

static int line_group(struct config *config, char **rest) {
    const uint32_t max[1] = {ATP_GROUPS - 1};
    uint32_t n[1], count = 0;
    char *word;

    if (parse_numbers(rest, max, n, 1) != 0)
        return -EINVAL;
    while ((word = next(rest)) != NULL) {
        struct atp_replica *replica = &config->replicas[count];
        if (count++ == ATP_REPLICAS_MAX || parse_address(word, &replica->port) != 0)
            return -EINVAL;
        replica->dst_ip = replica->port;
    }
    return count == 0 ? -EINVAL : atp_switch_set_group(config->sw, n[0], config->replicas, count);
}

static int line(struct config *config, char *text) {
    static const struct {
        const char *name;
        int (*apply)(struct config *config, char **rest);
    } kinds[] = {{"job", line_job},
                 {"admission", line_admission},
                 {"transit", line_transit},
                 {"ps", line_ps},
                 {"group", line_group}};
    char *rest = NULL;
    char *comment = strchr(text, '#');
    uint32_t port;
    char *word;

    if (comment != NULL)
        *comment = '\0';
    word = strtok_r(text, " \t\r\n", &rest);
    if (word == NULL)
        return 0;
    if (strcmp(word, "listen") == 0) {
        if (parse_address(next(&rest), &config->address) != 0 || parse_number(next(&rest), UINT16_MAX, &port) != 0)
            return -EINVAL;
        config->port = (uint16_t)port;
        return 0;
    }
    if (strcmp(word, "memory") == 0)
        return line_memory(config, &rest);
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
        if (strcmp(word, kinds[i].name) == 0)
            return config->sw == NULL ? -EINVAL : kinds[i].apply(config, &rest);
    return -EINVAL;
}

static int read_config(struct config *config, const char *path) {
    char text[LINE_MAX_BYTES];
    FILE *file = fopen(path, "r");
    int number = 0;
    int result = 0;

    if (file == NULL) {
        fprintf(stderr, "atp-relay: %s: %s\n", path, strerror(errno));
        return -EINVAL;
    }
    while (result == 0 && fgets(text, sizeof(text), file) != NULL) {
        number++;
        result = line(config, text);
    }
    fclose(file);
    if (result != 0)
        fprintf(stderr, "atp-relay: %s, line %d: %s\n", path, number, strerror(-result));
    else if (config->sw == NULL || config->port == 0)
        fprintf(stderr, "atp-relay: %s: needs the lines listen and memory\n", path);
    return result != 0 || config->sw == NULL || config->port == 0 ? -EINVAL : 0;
}

int main(int argc, char **argv) {
    static struct config config;
    sigset_t signals;
    int received;
    int result;

    if (argc != 2) {
        usage();
        return 2;
    }
    /* Blocked before the relay's thread exists, so that only this one waits for them. */
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL);
    if (read_config(&config, argv[1]) != 0) {
        atp_switch_close(config.sw);
        return 2;
    }
    result = atp_relay_start(config.sw, config.address, config.port);
    if (result != 0) {
        fprintf(stderr, "atp-relay: cannot listen: %s\n", strerror(-result));
        atp_switch_close(config.sw);
        return 1;
    }
    sigwait(&signals, &received);
    atp_switch_close(config.sw);
    return 0;
}
