/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The folder of a BPF file system in which maps and links outlive the switch; see pins.h. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <bpf/bpf.h>
#include <bpf/libbpf.h>

#include "bpf/shared.h"
#include "pins.h"

#define BPF_FS 0xcafe4a11 /* BPF_FS_MAGIC */
#define NAME_BYTES 64u

struct atp_pins {
    char directory[PATH_MAX - 2 * NAME_BYTES - 2];
    char maps[NAME_BYTES]; /* folder of the maps, in it */
    int lock;
};

static const char *const hook_names[] = {
    [ATP_PINNED_TC] = "tc",
    [ATP_PINNED_TC_ACK] = "ack",
    [ATP_PINNED_GUARD] = "guard",
    [ATP_PINNED_XDP] = "xdp",
};
#define HOOKS (sizeof(hook_names) / sizeof(hook_names[0]))

static void path_of(const struct atp_pins *pins, const char *folder, const char *name, char path[PATH_MAX]) {
    (void)snprintf(path, PATH_MAX, "%s/%s/%.*s", pins->directory, folder, (int)NAME_BYTES, name);
}

static int make_folder(const char *path) {
    return mkdir(path, 0700) != 0 && errno != EEXIST ? -errno : 0;
}

int atp_pins_open(const char *directory, uint32_t values, uint32_t aggregators, struct atp_pins **out) {
    struct atp_pins *pins = calloc(1, sizeof(*pins));
    struct statfs found;
    char path[PATH_MAX];
    int result;

    if (pins == NULL)
        return -ENOMEM;
    pins->lock = -1;
    result = strlen(directory) < sizeof(pins->directory) ? make_folder(directory) : -ENAMETOOLONG;
    if (result == 0) {
        strcpy(pins->directory, directory);
        result = statfs(directory, &found) != 0 ? -errno : (uint32_t)found.f_type == BPF_FS ? 0 : -EMEDIUMTYPE;
    }
    if (result == 0) {
        pins->lock = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (pins->lock < 0)
            result = -errno;
        else if (flock(pins->lock, LOCK_EX | LOCK_NB) != 0)
            result = errno == EWOULDBLOCK ? -EBUSY : -errno;
    }
    if (result == 0) {
        (void)snprintf(pins->maps, sizeof(pins->maps), "maps_%u_%u_%u", ATP_PINNED_LAYOUT, values, aggregators);
        path_of(pins, pins->maps, "", path);
        result = make_folder(path);
    }
    if (result == 0) {
        path_of(pins, "links", "", path);
        result = make_folder(path);
    }
    if (result != 0) {
        atp_pins_close(pins);
        return result;
    }
    *out = pins;
    return 0;
}

void atp_pins_close(struct atp_pins *pins) {
    if (pins == NULL)
        return;
    if (pins->lock >= 0)
        close(pins->lock);
    free(pins);
}

/* Whether the pinned map, if there is one, is what the object wants. */
static bool fits(const char *path, const struct bpf_map *map) {
    struct bpf_map_info info = {0};
    uint32_t length = sizeof(info);
    int fd = bpf_obj_get(path);
    bool same;

    if (fd < 0)
        return fd == -ENOENT;
    same = bpf_obj_get_info_by_fd(fd, &info, &length) == 0 && info.type == bpf_map__type(map) &&
           info.key_size == bpf_map__key_size(map) && info.value_size == bpf_map__value_size(map) &&
           info.max_entries == bpf_map__max_entries(map) && info.map_flags == bpf_map__map_flags(map);
    close(fd);
    return same;
}

static void remove_all(const char *folder) {
    DIR *listing = opendir(folder);
    struct dirent *entry;
    char path[PATH_MAX];

    while (listing != NULL && (entry = readdir(listing)) != NULL) {
        if (entry->d_name[0] == '.')
            continue;
        if (snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name) < (int)sizeof(path))
            (void)unlink(path);
    }
    if (listing != NULL)
        closedir(listing);
}

/* A BPF file system takes no dots in names, and the maps of data sections have one. */
static void map_path(const struct atp_pins *pins, const struct bpf_map *map, char path[PATH_MAX]) {
    char name[NAME_BYTES];

    (void)snprintf(name, sizeof(name), "%s", bpf_map__name(map));
    for (char *c = name; *c != '\0'; c++)
        if (*c == '.')
            *c = '_';
    path_of(pins, pins->maps, name, path);
}

static bool is_constant(const struct bpf_map *map) {
    return strstr(bpf_map__name(map), ".rodata") != NULL;
}

int atp_pins_place(const struct atp_pins *pins, struct bpf_object *object) {
    struct bpf_map *map;
    char path[PATH_MAX];
    int result;

    /* All or none: maps of which one is of another kind are of another program. */
    bpf_object__for_each_map(map, object) {
        map_path(pins, map, path);
        if (is_constant(map) || fits(path, map))
            continue;
        path_of(pins, pins->maps, "", path);
        remove_all(path);
        break;
    }
    bpf_object__for_each_map(map, object) {
        if (is_constant(map))
            continue;
        map_path(pins, map, path);
        result = bpf_map__set_pin_path(map, path);
        if (result != 0)
            return result;
    }
    return 0;
}

void atp_pins_forget_others(const struct atp_pins *pins) {
    DIR *listing = opendir(pins->directory);
    struct dirent *entry;
    char path[PATH_MAX];

    while (listing != NULL && (entry = readdir(listing)) != NULL) {
        if (strncmp(entry->d_name, "maps_", 5) != 0 || strcmp(entry->d_name, pins->maps) == 0 ||
            strlen(entry->d_name) >= NAME_BYTES)
            continue;
        path_of(pins, entry->d_name, "", path);
        remove_all(path);
        (void)rmdir(path);
    }
    if (listing != NULL)
        closedir(listing);
}

static void link_path(const struct atp_pins *pins, uint32_t ifindex, enum atp_pinned_hook hook, char path[PATH_MAX]) {
    char name[NAME_BYTES];

    (void)snprintf(name, sizeof(name), "%u_%s", ifindex, hook_names[hook]);
    path_of(pins, "links", name, path);
}

int atp_pin_link(const struct atp_pins *pins, uint32_t ifindex, enum atp_pinned_hook hook, int link) {
    char path[PATH_MAX];

    link_path(pins, ifindex, hook, path);
    (void)unlink(path); /* of an interface that had this number before */
    return bpf_obj_pin(link, path);
}

void atp_unpin_link(const struct atp_pins *pins, uint32_t ifindex, enum atp_pinned_hook hook) {
    char path[PATH_MAX];

    link_path(pins, ifindex, hook, path);
    (void)unlink(path);
}

static bool parse(const char *name, uint32_t *ifindex, enum atp_pinned_hook *hook) {
    char *end;
    unsigned long number = strtoul(name, &end, 10);

    if (end == name || *end != '_' || number == 0 || number > INT_MAX)
        return false;
    for (uint32_t i = 0; i < HOOKS; i++) {
        if (strcmp(end + 1, hook_names[i]) != 0)
            continue;
        *ifindex = (uint32_t)number;
        *hook = (enum atp_pinned_hook)i;
        return true;
    }
    return false;
}

/* A link whose interface is gone says that it is attached to none. All kinds of links tell the interface first. */
static bool is_at(int link, uint32_t ifindex) {
    struct bpf_link_info info = {0};
    uint32_t length = sizeof(info);

    return bpf_obj_get_info_by_fd(link, &info, &length) == 0 && info.xdp.ifindex == ifindex;
}

int atp_pins_each_link(const struct atp_pins *pins, atp_link_fn each, void *context) {
    enum atp_pinned_hook hook;
    struct dirent *entry;
    char path[PATH_MAX];
    uint32_t ifindex;
    DIR *listing;
    int result = 0;

    path_of(pins, "links", "", path);
    listing = opendir(path);
    if (listing == NULL)
        return -errno;
    while (result == 0 && (entry = readdir(listing)) != NULL) {
        int link;

        if (!parse(entry->d_name, &ifindex, &hook))
            continue;
        link_path(pins, ifindex, hook, path);
        link = bpf_obj_get(path);
        if (link < 0 || !is_at(link, ifindex)) {
            (void)unlink(path);
            if (link >= 0)
                close(link);
            continue;
        }
        result = each(context, ifindex, hook, link);
        if (result != 0)
            close(link);
    }
    closedir(listing);
    return result;
}
