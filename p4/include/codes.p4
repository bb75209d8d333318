/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Codes that the stages hand on. They are numbers, not enums: tables match on them, and the second pass carries them in
 * a header.
 */
#ifndef ATP_CODES_P4
#define ATP_CODES_P4

#include "events.p4"

/* A field of an entry that does not count. */
#define ANY _

/* What a packet is, after steps 1 to 6 of docs/protocol.md, "What a switch does". */
#define K_ORDINARY 0   /* forwarded as any other traffic */
#define K_SHORT 1
#define K_GRAD0 2      /* gradient for level 0 */
#define K_GRAD1 3      /* gradient for level 1 */
#define K_RESEND0 4
#define K_RESEND1 5
#define K_KEEP 6       /* second pass: fetch the second halves; the aggregator keeps its result */
#define K_FREE 7       /* second pass: fetch the second halves and release the aggregator */
#define K_ACK 8
#define K_ACK_ONE 9    /* for its addressee alone */
#define K_UNKNOWN 10
#define K_RAW 11
#define K_LENGTH 12
#define K_ACK_SOURCE 13
#define K_INDEX 14
#define K_BIT 15
#define K_TRANSIT 16
#define K_REPEAT0 18   /* sent again to add what is missing: allocates, empties and releases nothing */
#define K_REPEAT1 19
#define K_ODD 20       /* IP options or a fragment: what it says is not read */
/* What the guard drops (docs/protocol.md, "The guard"). */
#define K_SOURCE 24
#define K_DESTINATION 25
#define K_MALFORMED 26
#define K_FORGED 27
/* Either level. */
#define K_GRAD K_GRAD0 &&& 0xFE
#define K_RESEND K_RESEND0 &&& 0xFE
#define K_REPEAT K_REPEAT0 &&& 0xFE
/* For the group or for one. */
#define K_ANY_ACK K_ACK &&& 0xFE
/* Dropped by the guard; refused by steps 3 to 6. The low three bits tell the eight apart, see `drops`. */
#define K_GUARDED K_SOURCE &&& 0xFC
#define K_REFUSED K_LENGTH &&& 0xFC

/* What happens to the values of the aggregator. */
#define OP_NONE 0
#define OP_WRITE 1       /* store the packet's values */
#define OP_ADD 2         /* add the packet's, sums into the packet */
#define OP_READ 3        /* sums into the packet */
#define OP_READ_SECOND 4 /* Tofino, second pass: second halves into the packet */

/* Where the packet goes. */
#define OUT_FORWARD 0
#define OUT_DROP 1
#define OUT_CARRY_KEEP 2 /* carries values out; the aggregator keeps its result */
#define OUT_CARRY_FREE 3 /* carries values out and releases the aggregator */
#define OUT_MULTICAST 4

/*
 * A stateful ALU reports its two comparisons as one of four bits. A register action that ran no comparison, or did not
 * run, reports 0.
 */
#define P_NONE 1
#define P_FIRST 2
#define P_SECOND 4
#define P_BOTH 8

/* Key: first = same job, sequence and level; second = stale or free. */
#define KEY_OTHER P_NONE
#define KEY_OWN P_FIRST
#define KEY_VACANT P_SECOND
#define KEY_OWN_STALE P_BOTH
/* ACK: first = own at level 1; second = own at level 0. */
#define ACK_MISS P_NONE

/* Missing workers: first = only this packet's are missing; second = none is. */
#define MISSING_MORE P_NONE
#define MISSING_THIS P_FIRST
#define MISSING_NONE P_SECOND
/* A register action that takes the aggregator, or would, reports: first = nobody else is missing. */
#define TAKE_MORE P_NONE
#define TAKE_DONE P_FIRST

/* Cover, second pass: first = nobody was added since the first pass. */
#define COVER_SAME P_FIRST

#endif
