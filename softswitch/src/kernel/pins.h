/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What outlives a switch: maps and links in a folder of a BPF file system. Packets go on being summed and guarded while
 * no process is there, and the next one finds everything as it was.
 *
 *     DIR                                       locked by the process that has it open
 *     DIR/maps_LAYOUT_VALUES_AGGREGATORS/NAME   maps
 *     DIR/links/IFINDEX_HOOK                    what is attached
 */
#ifndef ATP_PINS_H
#define ATP_PINS_H

#include <stdint.h>

struct bpf_object;
struct atp_pins;

enum atp_pinned_hook {
    ATP_PINNED_TC,
    ATP_PINNED_TC_ACK,
    ATP_PINNED_GUARD,
    ATP_PINNED_XDP,
};

typedef int (*atp_link_fn)(void *context, uint32_t ifindex, enum atp_pinned_hook hook, int link);

/* Make the folders and lock them. -EMEDIUMTYPE: no BPF file system; -EBUSY: another process has it open. */
int atp_pins_open(const char *directory, uint32_t values, uint32_t aggregators, struct atp_pins **out);
void atp_pins_close(struct atp_pins *pins);
/* Before bpf_object__load(): each map but the constants is taken from its pin, or pinned when it is made. */
int atp_pins_place(const struct atp_pins *pins, struct bpf_object *object);
/* Remove the maps of other layouts and sizes. */
void atp_pins_forget_others(const struct atp_pins *pins);
int atp_pin_link(const struct atp_pins *pins, uint32_t ifindex, enum atp_pinned_hook hook, int link);
void atp_unpin_link(const struct atp_pins *pins, uint32_t ifindex, enum atp_pinned_hook hook);
/* Every link whose interface is still there; `each` owns it when it returns 0. Others are removed. */
int atp_pins_each_link(const struct atp_pins *pins, atp_link_fn each, void *context);

#endif
