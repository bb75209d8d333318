/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The data path in the kernel: loads the objects of bpf/, maps their tables, attaches them to interfaces. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/if_link.h>
#include <linux/membarrier.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <bpf/bpf.h>
#include <bpf/libbpf.h>

#include "pins.h"
#include "switch.h"

/* BPF_TCX_INGRESS and BPF_TCX_EGRESS, which the headers of Linux 6.1 do not have. */
#define TCX_INGRESS 46
#define TCX_EGRESS 47
/* Our place among the classic tc filters of an interface. */
#define TC_HANDLE 0x1u
#define TC_PRIORITY 10800u

enum attach_kind { ATTACH_TC = 1, ATTACH_XDP };

/* What is attached to one interface. */
struct attachment {
    uint32_t ifindex;
    enum attach_kind kind;
    int tc_link;    /* tcx; -1: a classic tc filter */
    int guard_link; /* the same at the egress */
    int xdp_link;   /* -1: none */
    bool left;      /* by an earlier switch, with its programs */
};

struct atp_bpf {
    struct bpf_object *object;
    int tc, tc_ack, tc_guard, xdp, xdp_bench, scan; /* programs */
    int counters, hosts, sources, drops;            /* maps */
    size_t aggregator_size;
    int cpus;
    bool classic_tc;
    struct atp_control_area *area;
    struct {
        void *address;
        size_t length;
    } mapping[6];
    struct attachment *attachments;
    uint32_t attached;
    struct atp_pins *pins; /* NULL: everything goes with the switch */
};

/* ---- the data path's part of the control plane ---- */

static void bpf_barrier(struct atp_switch *sw) {
    struct timespec rest = {.tv_nsec = 50000000};

    (void)sw;
    /* Returns after an RCU grace period, and BPF programs run inside RCU read sections. */
    if (syscall(__NR_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) != 0)
        nanosleep(&rest, NULL); /* not on nohz_full kernels: no packet takes that long */
}

/* One run of atp_scan over [start, end), at most ATP_SCAN_MAX of them. */
static int scan_once(struct atp_bpf *b, enum atp_scan_op op, uint8_t job_id, uint32_t start, uint32_t end) {
    uint8_t frame[64] = {0};
    LIBBPF_OPTS(bpf_test_run_opts, run, .data_in = frame, .data_size_in = sizeof(frame), .repeat = 1);
    int result;

    b->area->op = op;
    b->area->job_id = job_id;
    b->area->start = start;
    b->area->end = end;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    result = bpf_prog_test_run_opts(b->scan, &run);
    if (result != 0)
        return result;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return b->area->busy != 0 ? -EAGAIN : (int)b->area->found;
}

static int bpf_scan(struct atp_switch *sw, enum atp_scan_op op, uint8_t job_id) {
    int found = 0;

    for (uint32_t start = 0; start < sw->aggregators; start += ATP_SCAN_MAX) {
        uint32_t left = sw->aggregators - start;
        int result = scan_once(sw->bpf, op, job_id, start, start + (left < ATP_SCAN_MAX ? left : ATP_SCAN_MAX));

        if (result < 0)
            return result;
        found += result;
    }
    return found;
}

/*
 * The programs count time in ticks, whose length only the kernel's configuration says: measure it. When that gives no
 * known tick length, they use the clock that needs a call.
 */
static int calibrate(struct atp_bpf *b) {
    static const uint64_t ticks_ns[] = {1000000, 3333333, 4000000, 10000000};
    const struct timespec wait = {.tv_nsec = 60000000};
    uint64_t jiffies, ns, tick;
    int result = scan_once(b, ATP_SCAN_COUNT, 0, 0, 0);

    if (result < 0)
        return result;
    jiffies = b->area->seen_jiffies;
    ns = b->area->seen_ns;
    nanosleep(&wait, NULL);
    result = scan_once(b, ATP_SCAN_COUNT, 0, 0, 0);
    if (result < 0)
        return result;
    if (b->area->seen_jiffies == jiffies)
        return 0;
    tick = (b->area->seen_ns - ns) / (b->area->seen_jiffies - jiffies);
    for (size_t i = 0; i < sizeof(ticks_ns) / sizeof(ticks_ns[0]); i++) {
        if (tick < ticks_ns[i] * 9 / 10 || tick > ticks_ns[i] * 11 / 10)
            continue;
        b->area->base_ns = b->area->seen_ns - b->area->seen_jiffies * ticks_ns[i];
        b->area->tick_ns = ticks_ns[i];
    }
    return 0;
}

static int bpf_read_counters(struct atp_switch *sw, uint8_t job_id, uint64_t *out) {
    const struct atp_bpf *b = sw->bpf;
    struct atp_counters *cores = calloc((size_t)b->cpus, sizeof(*cores));
    uint32_t key = job_id;
    int result;

    if (cores == NULL)
        return -ENOMEM;
    result = bpf_map_lookup_elem(b->counters, &key, cores);
    memset(out, 0, sizeof(*cores));
    for (int cpu = 0; result == 0 && cpu < b->cpus; cpu++)
        for (uint32_t i = 0; i < ATP_COUNTERS; i++)
            out[i] += cores[cpu].c[i];
    free(cores);
    return result;
}

static int bpf_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_head *head,
                               uint64_t *pairs) {
    const struct atp_bpf *b = sw->bpf;
    int result = scan_once(sw->bpf, ATP_SCAN_READ, 0, index, index + 1);

    if (result < 0)
        return result;
    memcpy(head, b->area->copy, sizeof(*head));
    memcpy(pairs, (const uint8_t *)b->area->copy + sizeof(*head), b->aggregator_size - sizeof(*head));
    return 0;
}

static int bpf_write_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host) {
    const struct atp_bpf *b = sw->bpf;

    return host != NULL ? bpf_map_update_elem(b->hosts, &address, host, BPF_ANY)
                        : bpf_map_delete_elem(b->hosts, &address);
}

static int bpf_write_sources(struct atp_switch *sw, uint32_t port, const struct atp_sources *sources) {
    const struct atp_bpf *b = sw->bpf;

    return sources != NULL ? bpf_map_update_elem(b->sources, &port, sources, BPF_ANY)
                           : bpf_map_delete_elem(b->sources, &port);
}

static int bpf_read_drops(struct atp_switch *sw, struct atp_port_drops *out, uint32_t count) {
    const struct atp_bpf *b = sw->bpf;
    uint32_t found = 0;
    uint32_t key;
    int result = bpf_map_get_next_key(b->drops, NULL, &key);

    while (result == 0 && found < count) {
        uint32_t next;

        /* An entry may be forgotten between the two calls. */
        found += bpf_map_lookup_elem(b->drops, &key, &out[found]) == 0;
        result = bpf_map_get_next_key(b->drops, &key, &next);
        key = next;
    }
    return result != 0 && result != -ENOENT ? result : (int)found;
}

static int bpf_read_hosts(struct atp_switch *sw, struct atp_held_host *out, uint32_t count) {
    const struct atp_bpf *b = sw->bpf;
    uint32_t found = 0;
    uint32_t key;
    int result = bpf_map_get_next_key(b->hosts, NULL, &key);

    while (result == 0) {
        if (found == count)
            return -ENOSPC;
        result = bpf_map_lookup_elem(b->hosts, &key, &out[found].host);
        out[found].address = key;
        found++;
        if (result == 0)
            result = bpf_map_get_next_key(b->hosts, &key, &key);
    }
    return result == -ENOENT ? (int)found : result;
}

static void bpf_set_unguarded(struct atp_switch *sw, uint32_t jobs) {
    __atomic_store_n(&sw->bpf->area->unguarded_jobs, jobs, __ATOMIC_RELEASE);
}

/* ---- attachment ---- */

static struct attachment *find_attachment(struct atp_bpf *b, uint32_t ifindex) {
    for (uint32_t i = 0; i < b->attached; i++)
        if (b->attachments[i].ifindex == ifindex)
            return &b->attachments[i];
    return NULL;
}

static void detach_classic_tc(uint32_t ifindex, enum bpf_tc_attach_point where) {
    LIBBPF_OPTS(bpf_tc_hook, hook, .ifindex = (int)ifindex, .attach_point = where);
    LIBBPF_OPTS(bpf_tc_opts, filter, .handle = TC_HANDLE, .priority = TC_PRIORITY);

    /* The clsact qdisc stays: others may have filters there, and an empty one does nothing. */
    (void)bpf_tc_detach(&hook, &filter);
}

/* Returns 0 and the tcx link, or -1 in its place for a classic filter (kernels before 6.6). */
static int attach_tc(int program, uint32_t ifindex, enum bpf_tc_attach_point where, bool classic, int *link) {
    const enum bpf_attach_type tcx = (enum bpf_attach_type)(where == BPF_TC_INGRESS ? TCX_INGRESS : TCX_EGRESS);
    LIBBPF_OPTS(bpf_tc_hook, hook, .ifindex = (int)ifindex, .attach_point = where);
    LIBBPF_OPTS(bpf_tc_opts, filter, .prog_fd = program, .handle = TC_HANDLE, .priority = TC_PRIORITY,
                .flags = BPF_TC_F_REPLACE);
    int result;

    *link = classic ? -EOPNOTSUPP : bpf_link_create(program, (int)ifindex, tcx, NULL);
    if (*link >= 0)
        return 0;
    if (*link != -EINVAL && *link != -EOPNOTSUPP)
        return *link;
    *link = -1;
    result = bpf_tc_hook_create(&hook);
    if (result != 0 && result != -EEXIST)
        return result;
    return bpf_tc_attach(&hook, &filter);
}

static int attach_xdp(int program, uint32_t ifindex, int *link) {
    LIBBPF_OPTS(bpf_link_create_opts, generic, .flags = XDP_FLAGS_SKB_MODE);

    *link = bpf_link_create(program, (int)ifindex, BPF_XDP, NULL);
    if (*link < 0 && *link != -EBUSY && *link != -EPERM && *link != -ENODEV)
        *link = bpf_link_create(program, (int)ifindex, BPF_XDP, &generic); /* the driver cannot, or not now */
    return *link < 0 ? *link : 0;
}

static void detach_link(struct atp_bpf *b, uint32_t ifindex, enum atp_pinned_hook hook, int link) {
    if (b->pins != NULL)
        atp_unpin_link(b->pins, ifindex, hook);
    close(link);
}

static enum atp_pinned_hook ingress_hook(enum attach_kind kind) {
    return kind == ATTACH_TC ? ATP_PINNED_TC : ATP_PINNED_TC_ACK;
}

/* Take off what attach() put on, in any order of failure: what is not there stays so. */
static void detach(struct atp_bpf *b, const struct attachment *a) {
    if (a->xdp_link >= 0)
        detach_link(b, a->ifindex, ATP_PINNED_XDP, a->xdp_link);
    if (a->tc_link >= 0)
        detach_link(b, a->ifindex, ingress_hook(a->kind), a->tc_link);
    else
        detach_classic_tc(a->ifindex, BPF_TC_INGRESS);
    if (a->guard_link >= 0)
        detach_link(b, a->ifindex, ATP_PINNED_GUARD, a->guard_link);
    else
        detach_classic_tc(a->ifindex, BPF_TC_EGRESS);
}

static int pin_links(const struct atp_bpf *b, const struct attachment *a) {
    int result = 0;

    if (b->pins == NULL)
        return 0;
    if (a->tc_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ingress_hook(a->kind), a->tc_link);
    if (result == 0 && a->guard_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ATP_PINNED_GUARD, a->guard_link);
    if (result == 0 && a->xdp_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ATP_PINNED_XDP, a->xdp_link);
    return result;
}

/* When no program of an earlier switch is attached any more, maps of another layout have no use. */
static void forget_other_layouts(const struct atp_bpf *b) {
    for (uint32_t i = 0; i < b->attached; i++)
        if (b->attachments[i].left)
            return;
    if (b->pins != NULL)
        atp_pins_forget_others(b->pins);
}

/* Put the programs of this switch where an earlier one left its own: each packet meets the one or the other. */
static int replace_programs(const struct atp_bpf *b, struct attachment *a) {
    int result = 0;

    if (a->tc_link < 0 || a->guard_link < 0 || (a->kind == ATTACH_XDP) != (a->xdp_link >= 0))
        return -ENOENT; /* something of it is missing */
    result = bpf_link_update(a->guard_link, b->tc_guard, NULL);
    if (result == 0)
        result = bpf_link_update(a->tc_link, a->kind == ATTACH_TC ? b->tc : b->tc_ack, NULL);
    if (result == 0 && a->kind == ATTACH_XDP)
        result = bpf_link_update(a->xdp_link, b->xdp, NULL);
    a->left = result != 0;
    return result;
}

static void remove_attachment(struct atp_bpf *b, struct attachment *a) {
    detach(b, a);
    *a = b->attachments[--b->attached];
    forget_other_layouts(b);
}

static int add_attachment(struct atp_bpf *b, const struct attachment *new) {
    struct attachment *more = realloc(b->attachments, (b->attached + 1) * sizeof(*more));

    if (more == NULL)
        return -ENOMEM;
    b->attachments = more;
    b->attachments[b->attached++] = *new;
    return 0;
}

static int attach(struct atp_switch *sw, uint32_t ifindex, enum attach_kind kind) {
    struct atp_bpf *b = sw->bpf;
    struct attachment *old = find_attachment(b, ifindex);
    struct attachment new = {.ifindex = ifindex, .kind = kind, .tc_link = -1, .guard_link = -1, .xdp_link = -1};
    int result;

    if (old != NULL && !old->left)
        return old->kind == kind ? 0 : -EBUSY;
    if (old != NULL && old->kind == kind && replace_programs(b, old) == 0) {
        forget_other_layouts(b);
        return 0;
    }
    if (old != NULL)
        remove_attachment(b, old);
    result = attach_tc(kind == ATTACH_TC ? b->tc : b->tc_ack, ifindex, BPF_TC_INGRESS, b->classic_tc, &new.tc_link);
    if (result != 0)
        return result;
    result = attach_tc(b->tc_guard, ifindex, BPF_TC_EGRESS, b->classic_tc, &new.guard_link);
    if (result == 0 && kind == ATTACH_XDP)
        result = attach_xdp(b->xdp, ifindex, &new.xdp_link);
    if (result == 0)
        result = pin_links(b, &new);
    if (result == 0)
        result = add_attachment(b, &new);
    if (result != 0)
        detach(b, &new);
    return result;
}

/* One link that an earlier switch left. */
static int take_over_link(void *context, uint32_t ifindex, enum atp_pinned_hook hook, int link) {
    struct atp_bpf *b = context;
    struct attachment *a = find_attachment(b, ifindex);
    const struct attachment none = {
        .ifindex = ifindex, .kind = ATTACH_TC, .tc_link = -1, .guard_link = -1, .xdp_link = -1, .left = true};
    int result = 0;

    if (a == NULL) {
        result = add_attachment(b, &none);
        a = find_attachment(b, ifindex);
    }
    if (result != 0)
        return result;
    switch (hook) {
    case ATP_PINNED_TC_ACK:
        a->kind = ATTACH_XDP;
        a->tc_link = link;
        break;
    case ATP_PINNED_TC:
        a->tc_link = link;
        break;
    case ATP_PINNED_GUARD:
        a->guard_link = link;
        break;
    case ATP_PINNED_XDP:
        a->kind = ATTACH_XDP;
        a->xdp_link = link;
        break;
    }
    return 0;
}

static int change_attachment(struct atp_switch *sw, uint32_t ifindex, enum attach_kind kind, bool on) {
    struct attachment *a;
    int result = 0;

    if (sw->bpf == NULL)
        return -ENOTSUP;
    if (ifindex == 0)
        return -EINVAL;
    pthread_mutex_lock(&sw->lock);
    a = find_attachment(sw->bpf, ifindex);
    if (on) {
        result = attach(sw, ifindex, kind);
    } else if (a == NULL || a->kind != kind) {
        result = -ENOENT;
    } else {
        remove_attachment(sw->bpf, a);
    }
    pthread_mutex_unlock(&sw->lock);
    return result;
}

ATP_EXPORT int atp_switch_attach_tc(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_TC, true);
}

ATP_EXPORT int atp_switch_detach_tc(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_TC, false);
}

ATP_EXPORT int atp_switch_attach_xdp(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_XDP, true);
}

ATP_EXPORT int atp_switch_detach_xdp(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_XDP, false);
}

ATP_EXPORT int atp_switch_left_attached(struct atp_switch *sw, uint32_t *ifindexes, uint32_t count) {
    uint32_t found = 0;

    if (ifindexes == NULL && count != 0)
        return -EINVAL;
    if (sw->bpf == NULL)
        return 0;
    pthread_mutex_lock(&sw->lock);
    for (uint32_t i = 0; i < sw->bpf->attached && found < count; i++)
        if (sw->bpf->attachments[i].left)
            ifindexes[found++] = sw->bpf->attachments[i].ifindex;
    pthread_mutex_unlock(&sw->lock);
    return (int)found;
}

/* ---- open and close ---- */

/* What is pinned stays attached when the last descriptor of it is closed. */
static void leave(const struct attachment *a) {
    if (a->xdp_link >= 0)
        close(a->xdp_link);
    if (a->tc_link >= 0)
        close(a->tc_link);
    if (a->guard_link >= 0)
        close(a->guard_link);
}

static void bpf_close(struct atp_switch *sw) {
    struct atp_bpf *b = sw->bpf;

    for (uint32_t i = 0; i < b->attached; i++)
        b->pins != NULL ? leave(&b->attachments[i]) : detach(b, &b->attachments[i]);
    for (size_t i = 0; i < sizeof(b->mapping) / sizeof(b->mapping[0]); i++)
        if (b->mapping[i].address != NULL)
            munmap(b->mapping[i].address, b->mapping[i].length);
    bpf_object__close(b->object);
    atp_pins_close(b->pins);
    free(b->attachments);
    free(b);
    sw->bpf = NULL;
}

static const struct atp_backend bpf_backend = {
    .barrier = bpf_barrier,
    .scan = bpf_scan,
    .read_counters = bpf_read_counters,
    .read_aggregator = bpf_read_aggregator,
    .write_host = bpf_write_host,
    .write_sources = bpf_write_sources,
    .read_drops = bpf_read_drops,
    .read_hosts = bpf_read_hosts,
    .set_unguarded = bpf_set_unguarded,
    .close = bpf_close,
};

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
    b->xdp_bench = find_program(b->object, "atp_xdp_bench");
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
    result = test_clock ? 0 : calibrate(b);
    if (result == 0 && b->pins != NULL)
        result = own_tables(sw);
    if (result == 0 && b->pins != NULL)
        result = atp_pins_each_link(b->pins, take_over_link, b);
    if (result == 0)
        forget_other_layouts(b);
    return result;
}

static int bpf_open(const struct atp_switch_options *options, bool test_clock, struct atp_switch **out) {
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
    sw->backend = &bpf_backend;
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
    return bpf_open(options, false, out);
}

/* ---- tests ---- */

ATP_EXPORT int atp_test_open_bpf(const struct atp_switch_options *options, struct atp_switch **out) {
    return bpf_open(options, true, out);
}

ATP_EXPORT int atp_test_use_classic_tc(struct atp_switch *sw) {
    if (sw->bpf == NULL)
        return -ENOTSUP;
    sw->bpf->classic_tc = true;
    return 0;
}

ATP_EXPORT int atp_test_set_clock(struct atp_switch *sw, uint64_t now_ns) {
    pthread_mutex_lock(&sw->lock);
    if (sw->bpf != NULL)
        __atomic_store_n(&sw->bpf->area->test_clock_ns, now_ns, __ATOMIC_SEQ_CST);
    else
        atp_native_set_clock(sw, now_ns);
    pthread_mutex_unlock(&sw->lock);
    return 0;
}

ATP_EXPORT int atp_test_run(struct atp_switch *sw, enum atp_program program, uint32_t ifindex, const uint8_t *frame,
                            size_t length, uint32_t repeat, uint8_t *out, size_t capacity, size_t *out_length,
                            int32_t *verdict, uint32_t *ns_per_run) {
    struct __sk_buff skb = {.ifindex = ifindex};
    struct xdp_md xdp = {.data_end = (uint32_t)length, .ingress_ifindex = ifindex};
    LIBBPF_OPTS(bpf_test_run_opts, run, .data_in = frame, .data_size_in = (uint32_t)length, .data_out = out,
                .data_size_out = (uint32_t)capacity, .repeat = (int)repeat);
    const struct atp_bpf *b = sw->bpf;
    int program_fd;
    int result;

    if (b == NULL)
        return -ENOTSUP;
    switch (program) {
    case ATP_PROGRAM_TC:
        program_fd = b->tc;
        break;
    case ATP_PROGRAM_TC_ACK:
        program_fd = b->tc_ack;
        break;
    case ATP_PROGRAM_XDP:
        program_fd = b->xdp;
        break;
    default:
        program_fd = b->xdp_bench;
        break;
    }
    if (program_fd < 0)
        return -ENOENT;
    if (program == ATP_PROGRAM_XDP || program == ATP_PROGRAM_XDP_BENCH) {
        run.ctx_in = &xdp;
        run.ctx_size_in = sizeof(xdp);
    } else {
        run.ctx_in = &skb;
        run.ctx_size_in = sizeof(skb);
    }
    result = bpf_prog_test_run_opts(program_fd, &run);
    if (result != 0)
        return result;
    if (out_length != NULL)
        *out_length = run.data_size_out;
    if (verdict != NULL)
        *verdict = (int32_t)run.retval;
    if (ns_per_run != NULL)
        *ns_per_run = run.duration;
    return 0;
}
