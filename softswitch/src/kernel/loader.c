/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Opens and closes the data path in the kernel: loads the objects of bpf/, maps their tables. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

/* Directory of the objects: as given, else ATP_SWITCH_OBJECT_DIR, else that of this library. */
static int object_path(const struct atp_switch_options *options, char *path, size_t size) {
    const char *directory = options->object_dir;
    char own[PATH_MAX];
    Dl_info self;
    int length;

    if (directory == NULL)
        directory = getenv("ATP_SWITCH_OBJECT_DIR");
    if (directory == NULL && dladdr((void *)&object_path, &self) != 0 && self.dli_fname != NULL &&
        strlen(self.dli_fname) < sizeof(own)) {
        char *slash;
        strcpy(own, self.dli_fname);
        slash = strrchr(own, '/');
        if (slash != NULL) {
            *slash = '\0';
            directory = own;
        }
    }
    length = snprintf(path, size, "%s/atp_switch_%u.o", directory ? directory : ".", options->values);
    return length < 0 || (size_t)length >= size ? -ENAMETOOLONG : 0;
}

static int map_memory(struct atp_bpf *b, size_t place, const struct bpf_map *map, void **out) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t length;
    void *address;

    if (map == NULL)
        return -ENOEXEC; /* not an object of this version */
    length = (size_t)bpf_map__value_size(map) * bpf_map__max_entries(map);
    length = (length + page - 1) / page * page;
    address = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, bpf_map__fd(map), 0);
    if (address == MAP_FAILED)
        return -errno;
    b->mapping[place].address = address;
    b->mapping[place].length = length;
    *out = address;
    return 0;
}

static int map_table(struct atp_bpf *b, size_t place, const char *name, void **out) {
    return map_memory(b, place, bpf_object__find_map_by_name(b->object, name), out);
}

static int find_program(const struct bpf_object *object, const char *name) {
    const struct bpf_program *program = bpf_object__find_program_by_name(object, name);

    return program != NULL ? bpf_program__fd(program) : -ENOENT;
}

/* The map of a data section; libbpf puts the start of the object's name before the section's. */
static struct bpf_map *section(const struct bpf_object *object, const char *suffix, size_t wanted) {
    struct bpf_map *map;

    bpf_object__for_each_map(map, object) {
        const char *name = bpf_map__name(map);
        size_t length = strlen(name);

        if (length >= strlen(suffix) && strcmp(name + length - strlen(suffix), suffix) == 0)
            return bpf_map__value_size(map) == wanted ? map : NULL;
    }
    return NULL;
}

/* Draw the number of new tables, or take over those of an earlier switch. */
static int own_tables(struct atp_switch *sw) {
    struct atp_bpf *b = sw->bpf;
    uint64_t token = b->area->token;

    if (token != 0)
        return atp_switch_take_over(sw);
    while (token == 0)
        if (getrandom(&token, sizeof(token), 0) != (ssize_t)sizeof(token))
            return -errno;
    __atomic_store_n(&b->area->token, token, __ATOMIC_RELEASE);
    return 0;
}

static int load(struct atp_switch *sw, const char *path, bool test_clock) {
    const struct atp_settings settings = {
        .stale_ns = sw->stale_ns, .aggregators = sw->aggregators, .test_clock = test_clock};
    struct atp_bpf *b = sw->bpf;
    struct atp_tables *t = &sw->tables;
    struct bpf_map *constants;
    struct bpf_map *map;
    int result;

    b->object = bpf_object__open_file(path, NULL);
    if (b->object == NULL)
        return -errno;
    constants = section(b->object, ".rodata", sizeof(settings));
    map = bpf_object__find_map_by_name(b->object, "atp_aggregators");
    if (constants == NULL || map == NULL)
        return -ENOEXEC;
    result = bpf_map__set_initial_value(constants, &settings, sizeof(settings));
    if (result != 0)
        return result;
    result = bpf_map__set_max_entries(map, sw->aggregators);
    if (result != 0)
        return result;
    b->aggregator_size = bpf_map__value_size(map);
    if (b->aggregator_size != sizeof(struct atp_aggregator_head) + sw->values / 2 * sizeof(uint64_t))
        return -ENOEXEC;
    if (b->pins != NULL && (result = atp_pins_place(b->pins, b->object)) != 0)
        return result;
    result = bpf_object__load(b->object);
    if (result != 0)
        return result;
    b->counters = bpf_object__find_map_fd_by_name(b->object, "atp_counters");
    b->hosts = bpf_object__find_map_fd_by_name(b->object, "atp_hosts");
    b->sources = bpf_object__find_map_fd_by_name(b->object, "atp_sources");
    b->drops = bpf_object__find_map_fd_by_name(b->object, "atp_drops");
    b->tc = find_program(b->object, "atp_tc");
    b->tc_guard = find_program(b->object, "atp_tc_guard");
    b->tc_ack = find_program(b->object, "atp_tc_ack");
    b->xdp = find_program(b->object, "atp_xdp");
    b->scan = find_program(b->object, "atp_scan");
    if (b->counters < 0 || b->hosts < 0 || b->sources < 0 || b->drops < 0 || b->tc < 0 || b->tc_ack < 0 ||
        b->tc_guard < 0 || b->xdp < 0 || b->scan < 0)
        return -ENOEXEC;
    if ((result = map_table(b, 0, "atp_job_slots", (void **)&t->job_slots)) != 0 ||
        (result = map_table(b, 1, "atp_jobs", (void **)&t->jobs)) != 0 ||
        (result = map_table(b, 2, "atp_group_slots", (void **)&t->group_slots)) != 0 ||
        (result = map_table(b, 3, "atp_groups", (void **)&t->groups)) != 0 ||
        (result = map_table(b, 4, "atp_queues", (void **)&t->queues)) != 0 ||
        (result = map_memory(b, 5, section(b->object, ".bss", sizeof(*b->area)), (void **)&b->area)) != 0)
        return result;
    result = test_clock ? 0 : atp_bpf_calibrate(b);
    if (result == 0 && b->pins != NULL)
        result = own_tables(sw);
    return result == 0 ? atp_bpf_find_left(b) : result;
}

int atp_bpf_open(const struct atp_switch_options *options, bool test_clock, struct atp_switch **out) {
    struct atp_switch *sw;
    char path[PATH_MAX];
    int result = atp_switch_new(options, &sw);

    if (result != 0)
        return result;
    sw->bpf = calloc(1, sizeof(*sw->bpf));
    if (sw->bpf == NULL) {
        atp_switch_close(sw);
        return -ENOMEM;
    }
    sw->backend = &atp_bpf_backend;
    sw->bpf->cpus = libbpf_num_possible_cpus();
    result = sw->bpf->cpus < 0 ? sw->bpf->cpus : object_path(options, path, sizeof(path));
    if (result == 0 && options->pin_dir != NULL)
        result = atp_pins_open(options->pin_dir, options->values, options->aggregators, &sw->bpf->pins);
    if (result == 0)
        result = load(sw, path, test_clock);
    if (result != 0) {
        atp_switch_close(sw);
        return result;
    }
    *out = sw;
    return 0;
}

ATP_EXPORT uint64_t atp_switch_token(const struct atp_switch *sw) {
    return sw->bpf != NULL && sw->bpf->pins != NULL ? sw->bpf->area->token : 0;
}

ATP_EXPORT int atp_switch_keep(struct atp_switch *sw, uint32_t seconds) {
    struct timespec now;
    uint64_t until = 0;

    if (sw->bpf == NULL || sw->bpf->pins == NULL)
        return -ENOTSUP;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (seconds != 0)
        until = ((uint64_t)now.tv_sec + seconds) * 1000000000u + (uint64_t)now.tv_nsec;
    __atomic_store_n(&sw->bpf->area->expires_ns, until, __ATOMIC_RELEASE);
    return 0;
}

ATP_EXPORT int atp_switch_open_bpf(const struct atp_switch_options *options, struct atp_switch **out) {
    return atp_bpf_open(options, false, out);
}
