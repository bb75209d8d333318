// SPDX-License-Identifier: Apache-2.0
//
// The ATP protocol (docs/protocol.md) as a bounded model: workers, switches and a parameter server (PS) over a network that
// reorders without limit and loses, duplicates and marks packets within a budget. docs/model.md says what is modelled, under
// which bounds, and what was found. Each `BUG_x` puts one known mistake back; the verifier must then find a violation.
//
// One process, because every event is atomic: one packet handled, one timer fired, one fault. Nondeterminism is the choice of
// the event. The network is one bag (a sorted array, so that equal bags are equal states).

// ---- bounds, all settable with -D ----
#ifndef TOPO
#define TOPO 1 /* see below */
#endif
#ifndef TOTAL
#define TOTAL 3 /* sequences of the job */
#endif
#ifndef W
#define W 2 /* window, packets */
#endif
#ifndef P
#define P W /* slots of the index table and entries of the PS's answered cache; at least the window */
#endif
#ifndef M
#define M (P + W) /* sequence modulus: the smallest with which the PS can tell its window and its cache apart */
#endif
#ifndef NIDX
#define NIDX 2 /* aggregators of each switch: 1 or 2 */
#endif
#ifndef LOSS
#define LOSS 0 /* budgets of faults */
#endif
#ifndef DUP
#define DUP 0
#endif
#ifndef EARLY
#define EARLY 0 /* resends and repeats that a timer or out-of-order ACKs start while packets are still on their way */
#endif
#ifdef REPEATS_ONLY
#define AGAIN F_COL /* whatever is sent again is repeated, not resent */
#else
#define AGAIN F_RES
#endif
#ifndef AGE
#define AGE 0 /* aggregators that become stale (idle for longer than T) at any time */
#endif
#ifndef FOREIGN
#define FOREIGN 0 /* aggregators that another job takes */
#endif
#ifndef RESET
#define RESET 0 /* switch resets: memory lost, with or without the tables */
#endif
#ifndef MARK
#define MARK 0 /* ECN marks */
#endif
#ifndef NBAG
#define NBAG 12 /* packets in flight; exceeding it is an error, not a loss */
#endif

// ---- topologies. Node 0 is the PS's ToR; node 1 + r is the ToR of rack r. ----
#if TOPO == 1 /* one level: workers 0, 1 and the PS under one switch */
#define NW 2
#define NR 1
#define NS 1
#define TWO_LEVELS 0
#define RACK(w) 0
#define RMASK(r) 3
#define IS_DIRECT(r) 0
#elif TOPO == 2 /* two racks of one worker, each with a ToR of its own */
#define NW 2
#define NR 2
#define NS 3
#define TWO_LEVELS 1
#define RACK(w) (w)
#define RMASK(r) (1 << (r))
#define IS_DIRECT(r) 0
#elif TOPO == 3 /* rack 0: workers 0, 1; worker 2 under the PS's ToR, a rack of one that enters level 1 directly */
#define NW 3
#define NR 2
#define NS 2
#define TWO_LEVELS 1
#define RACK(w) ((w) == 2 -> 1 : 0)
#define RMASK(r) ((r) == 1 -> 4 : 3)
#define IS_DIRECT(r) ((r) == 1)
#elif TOPO == 4 /* two racks of two workers */
#define NW 4
#define NR 2
#define NS 3
#define TWO_LEVELS 1
#define RACK(w) ((w) >> 1)
#define RMASK(r) (3 << (2 * (r)))
#define IS_DIRECT(r) 0
#elif TOPO == 5 /* worker 0 in a rack with a ToR, worker 1 under the PS's ToR */
#define NW 2
#define NR 2
#define NS 2
#define TWO_LEVELS 1
#define RACK(w) (w)
#define RMASK(r) (1 << (r))
#define IS_DIRECT(r) ((r) == 1)
#elif TOPO == 6 /* one level, three workers */
#define NW 3
#define NR 1
#define NS 1
#define TWO_LEVELS 0
#define RACK(w) 0
#define RMASK(r) 7
#define IS_DIRECT(r) 0
#elif TOPO == 7 /* three racks of one: rack 0 with a ToR, workers 1 and 2 under the PS's ToR */
#define NW 3
#define NR 3
#define NS 2
#define TWO_LEVELS 1
#define RACK(w) (w)
#define RMASK(r) (1 << (r))
#define IS_DIRECT(r) ((r) >= 1)
#endif

#ifndef K
#define K (2 * NW) /* timers that may fire in a row, the network being quiet and without further faults, before a result must arrive */
#endif

#define START P /* first sequence: negative numbers do not occur, and sequences wrap inside the run */
#define END (START + TOTAL)
#define WIRE(s) ((s) % M) /* the sequence as it stands in a packet; the rest of `s` is the checker's knowledge only */
#define SLOT(s) (WIRE(s) % P)
#ifdef SPREAD
#define INDEXES 2 /* the first two slots have an aggregator each */
#else
#define INDEXES 0 /* all slots start at the same aggregator, and collisions move them */
#endif
#define ALL ((1 << NW) - 1)
#define FIRST_OF_RACK(r) (RMASK(r) & 1 -> 0 : (RMASK(r) & 2 -> 1 : (RMASK(r) & 4 -> 2 : 3)))
#define WBIT(w) ((RMASK(RACK(w)) & ((1 << (w)) - 1)) == 0 -> 1 : (TOPO == 6 && (w) == 2 -> 4 : 2))
#define FULL0(r) (RMASK(r) == 7 -> 7 : ((RMASK(r) & (RMASK(r) - 1)) -> 3 : 1))
#ifdef BUG_FANIN1_IS_N
#define FULL1 (TOPO == 4 -> 15 : 7)
#else
#define FULL1 ((1 << NR) - 1)
#endif
/* global workers that bitmap0 `b` of rack `r` names */
#define EXPAND(b, r) ((b) << (TOPO == 4 -> 2 * (r) : (TOPO == 1 || TOPO == 6 -> 0 : FIRST_OF_RACK(r))))
#define RACKS_COVER(b1) (((b1) & 1 -> RMASK(0) : 0) | ((b1) & 2 -> RMASK(1) : 0) | ((b1) & 4 -> RMASK(2) : 0))

// ---- a packet is one int ----
// A value is a multiset of workers: who is in it at least once, who at least twice, and whether anything else is in it
// (another sequence, job or epoch). Bits 0-3, 4-7, 8.
#define VAL(x) ((x) & 511)
#define ONCE(x) ((x) & 15)
#define TWICE(x) (((x) >> 4) & 15)
#define BAD 256
#define VADD(x, y) ((VAL(x) | VAL(y)) | ((ONCE(x) & ONCE(y)) << 4))
#define EXACT(x) (VAL(x) == ALL)

#define B0(x) (((x) >> 9) & 7)
#define B1(x) (((x) >> 12) & 7)
#define EDGE(x) (((x) >> 15) & 1)
#define RES(x) (((x) >> 16) & 1)
#define COL(x) (((x) >> 17) & 1)
#define ECN(x) (((x) >> 18) & 1)
#define GECN(x) (((x) >> 19) & 1) /* a marked packet is in the value: the checker's knowledge */
#define ACK(x) (((x) >> 20) & 1)
#define RAW(x) (((x) >> 21) & 1)
#define SEQ(x) (((x) >> 22) & 7)
#define DST(x) (((x) >> 25) & 7)
#define IDX(x) (((x) >> 28) & 1)
#define NEWIDX(x) (((x) >> 29) & 1)
#define F_EDGE (1 << 15)
#define F_RES (1 << 16)
#define F_COL (1 << 17)
#define F_ECN (1 << 18)
#define F_GECN (1 << 19)
#define F_ACK (1 << 20)
#define F_RAW (1 << 21)
#define F_VALID (1 << 30)
#define TO(x, d) (((x) & ~(7 << 25)) | ((d) << 25))
#define TO_WORKER(x, w) (((x) & ~((7 << 25) | (7 << 9))) | ((4 + (w)) << 25) | ((w) << 9)) /* ACKs: B0 is the addressee */
#define N_X 0 /* the PS's ToR */
#define N_PS 3
#define IS_SWITCH(d) ((d) < 3)
#define REPEAT(x) (COL(x) && !RES(x)) /* of a gradient: sent again to add what is missing */

// ---- an aggregator is one int; 0 is free. Value in bits 0-8. ----
#define A_BITS(g) (((g) >> 9) & 7)
#define A_COMPLETE (1 << 12)
#define A_LEVEL(g) (((g) >> 13) & 1)
#define A_ECN (1 << 14)
#define A_GECN (1 << 15)
#define A_AGED (1 << 16) /* idle for longer than T */
#define A_FOREIGN (1 << 17)
#define A_SEQ(g) (((g) >> 18) & 7)
#define A_VALID (1 << 21)
#ifdef BUG_NO_STALE
#define IS_FREE(g) ((g) == 0)
#else
#ifdef BUG_STALE_SAME_KEY_JOINS
#define IS_FREE(g) ((g) == 0 || (((g) & A_AGED) && !own))
#else
#define IS_FREE(g) ((g) == 0 || ((g) & A_AGED))
#endif
#endif

#ifdef DOC_ANSWER_IS_REPLICATED
#define ANSWER_FLAG 0
#else
#define ANSWER_FLAG F_EDGE /* in an ACK: for its addressee alone, not to be replicated */
#endif

// ---- state ----
int net[NBAG];
int agg[NS * NIDX];
bit known[NS];         // does the switch have the job's tables?
byte wbase[NW];        // oldest sequence without a result
byte nxt[NW];          // next sequence never sent
byte got[NW];          // results within the window, relative to wbase
byte delivered[NW];    // checker: results given to the trainer, by true sequence
byte widx[NW];         // index table, one bit per slot
byte psbase = START;   // oldest unanswered sequence
byte psans;            // answered ones from psbase on
int pc[W * NW];        // contributions of the open sequences: coverage in bits 9-12, ecn, value
byte pscol;            // open sequences that met a collision, by slot
byte psidx;            // index table of the PS
byte cache[P];         // answered sequences: index, collision, new index, ecn, checker's ecn
#ifdef RAWSEQ
#define ISRAW(s) ((s) == START + RAWSEQ)
bit ps_is_raw;         // the one sequence whose sum saturates is being corrected
byte ps_raw;           // raw gradients that have arrived
#ifndef RAW_UNASKED
#define RAW_UNASKED 0 /* workers whose values are out of range: they send raw without being asked */
#endif
byte w_raw = RAW_UNASKED; // workers that send this sequence raw
#endif
byte loss = LOSS, dup = DUP, early = EARLY, age = AGE, foreign = FOREIGN, resets = RESET, mark = MARK;
byte fires, fired;
byte i, who;           // choice of the next event; zero between events
bit finished;

// Temporaries of one event.
hidden int p, g, q, v, x, bits, whole, lvl, own, sw, cov, c, k, j, r, hit, keep, a, lo, hi;
hidden int out[8];
hidden int nout;

inline emit(pkt) {
	assert(nout < 8);
	out[nout] = (pkt) | F_VALID;
	nout++
}

inline insert(pkt) {
	x = pkt;
	k = NBAG - 1;
	assert(net[k] == 0); /* raise NBAG */
	do
	:: k > 0 && net[k - 1] < x -> net[k] = net[k - 1]; k--
	:: else -> break
	od;
	net[k] = x
}

inline remove(n) {
	k = n;
	do
	:: k < NBAG - 1 -> net[k] = net[k + 1]; k++
	:: else -> break
	od;
	net[NBAG - 1] = 0
}

inline flush() {
	j = 0;
	do
	:: j < nout -> insert(out[j]); out[j] = 0; j++
	:: else -> break
	od;
	nout = 0
}

inline calm() { /* a fault or a result: the network may need its time-outs again */
	fires = 0;
	fired = 0
}

inline describe(pkt) {
	if
	:: ACK(pkt) && !RES(pkt) -> printf(" result")
	:: ACK(pkt) && RES(pkt) -> printf(" correction request")
	:: else -> printf(" gradient")
	fi;
	printf(" sequence %d (wire %d) to ", SEQ(pkt), WIRE(SEQ(pkt)));
	if
	:: DST(pkt) == N_X -> printf("PS's ToR")
	:: DST(pkt) == N_PS -> printf("PS")
	:: DST(pkt) >= 4 -> printf("worker %d", DST(pkt) - 4)
	:: else -> printf("ToR of rack %d", DST(pkt) - 1)
	fi;
	printf(": bitmap0 %d bitmap1 %d edge %d resend %d collision %d ecn %d rawFloat %d index %d; value once %d twice %d bad %d\n",
	       B0(pkt), B1(pkt), EDGE(pkt), RES(pkt), COL(pkt), ECN(pkt), RAW(pkt), IDX(pkt), ONCE(pkt), TWICE(pkt), (pkt >> 8) & 1)
}

inline towards_ps(pkt) {
	emit(TO(pkt, (sw == N_X -> N_PS : N_X)))
}

// ---- the switch: docs/protocol.md, "What a switch does" ----

inline forward_ack_unicast(pkt) { /* as any router would */
	if
	:: sw == N_X && TWO_LEVELS && !IS_DIRECT(RACK(B0(pkt))) -> emit(TO(pkt, 1 + RACK(B0(pkt))))
	:: else -> emit(TO_WORKER(pkt, B0(pkt)))
	fi
}

inline replicate_ack() {
	j = 0;
	do
	:: j < NW ->
		if
		:: sw != N_X && RACK(j) == sw - 1 -> emit(TO_WORKER(p, j))
		:: sw == N_X && (!TWO_LEVELS || IS_DIRECT(RACK(j))) -> emit(TO_WORKER(p, j))
		:: sw == N_X && TWO_LEVELS && !IS_DIRECT(RACK(j)) && j == FIRST_OF_RACK(RACK(j)) ->
			emit(TO((p & ~(7 << 9)) | (j << 9), 1 + RACK(j)))
		:: else
		fi;
		j++
	:: else -> break
	od
}

/* Step 9: the aggregator goes out in the packet's place. A value of another sequence than the header's is `bad`. */
inline out_aggregator() {
	p = (p & ~(511 | F_GECN)) | VAL(g) | (A_SEQ(g) != SEQ(p) -> BAD : 0) | ((g & A_ECN) -> F_ECN : 0) | ((g & A_GECN) -> F_GECN : 0);
	if
	:: lvl == 0 ->
		p = (p & ~(7 << 9)) | (A_BITS(g) << 9);
		if
		:: g & A_COMPLETE -> p = p | F_EDGE
		:: else
		fi
	:: else ->
		p = (p & ~(7 << 12)) | (A_BITS(g) << 12);
#ifdef BUG_EDGE_FLIPS_TWICE
		p = p & ~F_EDGE;
#else
		p = p | F_EDGE;
#endif
	fi;
	towards_ps(p)
}

inline add_to_aggregator() {
	g = (g & ~511) | VADD(g, p) | (A_SEQ(g) != SEQ(p) -> BAD : 0) | (bits << 9) | (ECN(p) -> A_ECN : 0) | (GECN(p) -> A_GECN : 0);
	if
	:: A_BITS(g) == whole -> g = g | A_COMPLETE
	:: else
	fi
}

#ifdef BUG_L1_COMBINES_PARTIAL
#define PASSES_LEVEL1 0
#else
#ifdef BUG_LEVEL_NOT_IN_KEY
#define PASSES_LEVEL1 (!IS_DIRECT(B1(p) >> 1)) /* the worker under this switch enters here at level 0 */
#else
#define PASSES_LEVEL1 1
#endif
#endif

inline handle_switch() {
	sw = DST(p);
	if
	:: RAW(p) -> /* step 2 */
		if
		:: ACK(p) -> forward_ack_unicast(p)
		:: else -> towards_ps(p)
		fi
	:: !RAW(p) && ACK(p) && !known[sw] -> forward_ack_unicast(p)
	:: !RAW(p) && ACK(p) && known[sw] -> /* step 4 */
		a = sw * NIDX + IDX(p);
		g = agg[a];
		if
		:: g != 0 && !(g & A_FOREIGN) && WIRE(A_SEQ(g)) == WIRE(SEQ(p)) -> agg[a] = 0
		:: else
		fi;
		if
		:: EDGE(p) -> forward_ack_unicast(p) /* an answer from the cache: for one worker */
		:: else -> replicate_ack()
		fi
	:: !RAW(p) && !ACK(p) && !known[sw] -> towards_ps(p)
	:: !RAW(p) && !ACK(p) && known[sw] && sw == N_X && TWO_LEVELS && !EDGE(p) && !RES(p) && PASSES_LEVEL1 ->
		towards_ps(p) /* step 6, in transit */
	:: else -> /* step 8 */
		a = sw * NIDX + IDX(p);
		g = agg[a];
		lvl = (sw == N_X && TWO_LEVELS);
		bits = (lvl -> B1(p) : B0(p));
		whole = (lvl -> FULL1 : FULL0((TWO_LEVELS -> sw - 1 : 0)));
#ifdef BUG_LEVEL_NOT_IN_KEY
		/* the notes: one aggregator for both levels, which bitmap counts is the packet's edge bit */
		bits = (sw == N_X && EDGE(p) -> B1(p) : B0(p));
#endif
		own = (g != 0 && !(g & A_FOREIGN) && WIRE(A_SEQ(g)) == WIRE(SEQ(p)) && A_LEVEL(g) == lvl);
#ifdef BUG_FOREIGN_KEY_JOINS
		own = (g != 0);
#endif
		if
#ifdef BUG_RESEND_IS_PLAIN
		:: false
#else
		:: RES(p) ->
			if
			:: own && (g & A_AGED) -> agg[a] = 0; towards_ps(p)
			:: own && !(g & A_AGED) && (g & A_COMPLETE) ->
				g = g | (ECN(p) -> A_ECN : 0);
				agg[a] = g;
				out_aggregator()
			:: own && !(g & (A_AGED | A_COMPLETE)) && lvl == 0 ->
				if
				:: (A_BITS(g) & bits) == 0 -> add_to_aggregator()
				:: else -> g = g | (ECN(p) -> A_ECN : 0)
				fi;
				agg[a] = 0;
				out_aggregator()
			:: own && !(g & (A_AGED | A_COMPLETE)) && lvl == 1 && (A_BITS(g) & bits) ->
				g = g | (ECN(p) -> A_ECN : 0);
				agg[a] = 0;
				out_aggregator()
			:: else -> towards_ps(p)
			fi
#endif
#ifdef BUG_REPEAT_ALLOCATES
		:: REPEAT(p) && own ->
#else
		:: REPEAT(p) ->
#endif
			if
			:: own && (g & A_AGED) -> agg[a] = 0
			:: else
			fi;
			if
			:: own && !(g & A_AGED) && (A_BITS(g) & bits) ->
				g = g | (ECN(p) -> A_ECN : 0);
				agg[a] = g;
				if
				:: (g & A_COMPLETE) && (bits & 1) -> out_aggregator()
				:: else
				fi
			:: own && !(g & A_AGED) && !(A_BITS(g) & bits) ->
				add_to_aggregator();
				agg[a] = g;
				if
				:: g & A_COMPLETE ->
					p = p & ~F_COL; /* the first copy of the result */
					out_aggregator()
				:: else
				fi
			:: else ->
				if
				:: lvl == 0 && bits == whole -> p = p | F_EDGE /* a rack of one is complete */
				:: else
				fi;
				towards_ps(p)
			fi
		:: else ->
#ifdef BUG_REPEAT_ALLOCATES
			p = p & ~F_COL;
#endif
			if
			:: IS_FREE(g) ->
				g = A_VALID | (SEQ(p) << 18) | (lvl << 13);
				add_to_aggregator();
				agg[a] = g;
				if
				:: g & A_COMPLETE -> out_aggregator()
				:: else
				fi
			:: !IS_FREE(g) && !own -> towards_ps(p | F_COL | F_RES)
			:: !IS_FREE(g) && own && (A_BITS(g) & bits) ->
				g = g | (ECN(p) -> A_ECN : 0);
				agg[a] = g;
				if
				:: g & A_COMPLETE -> out_aggregator()
				:: else
				fi
			:: else ->
				add_to_aggregator();
				g = g & ~A_AGED;
				agg[a] = g;
				if
				:: g & A_COMPLETE ->
#ifdef BUG_CLEAR_ON_COMPLETE
					agg[a] = 0;
#endif
					out_aggregator()
				:: else
				fi
			fi
		fi
	fi
}

// ---- the parameter server ----

/* `c` becomes the sequence from [lo, hi) with the packet's wire sequence, or -1. */
inline resolve() {
	c = lo;
	do
	:: c < hi && WIRE(c) != WIRE(SEQ(p)) -> c++
	:: c >= hi -> c = -1; break
	:: else -> break
	od
}

inline send_result(to_worker, value) {
	q = F_ACK | (c << 22) | (value) | ((cache[SLOT(c)] & 1) << 28) | ((cache[SLOT(c)] & 2) -> F_COL : 0) |
	    (((cache[SLOT(c)] >> 2) & 1) << 29) | ((cache[SLOT(c)] & 8) -> F_ECN : 0) | ((cache[SLOT(c)] & 16) -> F_GECN : 0) |
	    (to_worker << 9);
	emit(TO(q, N_X))
}

inline correction_request() {
	emit(TO(F_ACK | F_RES | (c << 22) | (((psidx >> SLOT(c)) & 1) << 28), N_X))
}

inline advance() {
	psans = psans | (1 << (c - psbase));
	do
	:: psans & 1 -> psbase++; psans = psans >> 1
	:: else -> break
	od;
#ifndef BUG_SEQUENCES_RESTART
	/* Packet lifetime and T stay inside the wrap: what could be taken for a sequence of the new window is gone, or stale. */
	j = 0;
	do
	:: j < NBAG && net[j] != 0 && SEQ(net[j]) + M <= psbase + W - 1 -> remove(j)
	:: j < NBAG && net[j] != 0 && SEQ(net[j]) + M > psbase + W - 1 -> j++
	:: else -> break
	od;
	j = 0;
	do
	:: j < NS * NIDX ->
		if
		:: agg[j] != 0 && !(agg[j] & A_FOREIGN) && A_SEQ(agg[j]) + M <= psbase + W - 1 -> agg[j] = agg[j] | A_AGED
		:: else
		fi;
		j++
	:: else -> break
	od
#endif
}

inline handle_ps() {
	lo = psbase - P;
	hi = psbase + W;
	resolve();
	if
	:: c < START -> skip /* outside the window */
	:: c >= START && (c < psbase || ((psans >> (c - psbase)) & 1)) ->
		/* answered: again, from the cache */
#ifndef BUG_NO_ANSWERED_CACHE
		cov = (EDGE(p) -> RACKS_COVER(B1(p)) : EXPAND(B0(p), (B1(p) >> 1)));
#ifdef DOC_ANSWER_ONE_RANK
		cov = cov & -cov; /* "to its sender's rank alone (worker address from coverage)", read as the first rank covered */
#endif
		j = 0;
		do
		:: j < NW ->
			if
			:: (cov >> j) & 1 ->
#ifdef RAWSEQ
				if
				:: ISRAW(c) -> emit(TO_WORKER(F_ACK | F_RAW | (c << 22) | ALL, j))
				:: else -> send_result(j, ALL | ANSWER_FLAG)
				fi
#else
				send_result(j, ALL | ANSWER_FLAG)
#endif
			:: else
			fi;
			j++
		:: else -> break
		od
#endif
	:: else ->
		if
		:: COL(p) && RES(p) -> pscol = pscol | (1 << SLOT(c))
		:: else
		fi;
		cov = (EDGE(p) -> RACKS_COVER(B1(p)) : EXPAND(B0(p), (B1(p) >> 1)));
#ifdef BUG_FLAT_BITMAP
		/* the notes: one bitmap, bitmap0 or bitmap1 as the edge bit says */
		cov = (EDGE(p) -> B1(p) : B0(p));
#endif
		v = VAL(p) | (SEQ(p) != c -> BAD : 0) | (cov << 9) | (ECN(p) << 18) | (GECN(p) << 19);
		r = (c % W) * NW;
#ifdef BUG_COLLISION_NOT_ADDED
		if
		:: COL(p) && RES(p) -> cov = 0
		:: else
		fi;
#endif
#ifdef RAWSEQ
		if
		:: RAW(p) && ISRAW(c) ->
			ps_raw = ps_raw | ONCE(p);
			cov = 0;
			if
			:: ps_raw == ALL ->
				cache[SLOT(c)] = (psidx >> SLOT(c)) & 1;
				j = 0;
				do
				:: j < NW -> pc[r + j] = 0; emit(TO_WORKER(F_ACK | F_RAW | (c << 22) | ALL, j)); j++
				:: else -> break
				od;
				pscol = pscol & ~(1 << SLOT(c));
				ps_is_raw = 0;
				ps_raw = 0;
				advance()
			:: ps_raw != ALL && !ps_is_raw ->
				/* a worker sent raw values unasked (NaN, Inf, out of range): ask the others */
				ps_is_raw = 1;
				j = 0;
				do
				:: j < NW -> pc[r + j] = 0; j++
				:: else -> break
				od;
				correction_request()
			:: else
			fi
		:: !RAW(p) && ISRAW(c) && ps_is_raw -> cov = 0 /* waiting for raw gradients */
		:: else
		fi;
#endif
		/* hit: contributions that overlap; keep: one of them is not inside the new one */
		j = 0;
		keep = 0;
		hit = 0;
		do
		:: j < NW ->
			if
			:: ((pc[r + j] >> 9) & 15) & cov ->
				hit = 1;
				if
				:: ((pc[r + j] >> 9) & 15) & ~cov -> keep = 1
				:: else
				fi
			:: else
			fi;
			j++
		:: else -> break
		od;
#ifdef BUG_DROP_ANY_OVERLAP
		keep = hit;
#endif
#ifdef BUG_ADD_ANY_OVERLAP
		keep = 0;
#endif
		if
		:: keep || cov == 0 -> skip
		:: else ->
#ifndef BUG_ADD_ANY_OVERLAP
			/* drop what it contains */
			j = 0;
			do
			:: j < NW ->
				if
				:: ((pc[r + j] >> 9) & 15) & cov ->
					k = j;
					do
					:: k < NW - 1 -> pc[r + k] = pc[r + k + 1]; k++
					:: else -> break
					od;
					pc[r + NW - 1] = 0
				:: else -> j++
				fi
			:: else -> break
			od;
#else
			if
			:: hit -> v = (v & ~511) | VADD(v, pc[r]) | ((v | pc[r]) & (15 << 9)); pc[r] = pc[r + 1]; pc[r + 1] = 0
			:: else
			fi;
#endif
			k = NW - 1;
			assert(pc[r + k] == 0);
			do
			:: k > 0 && pc[r + k - 1] < v -> pc[r + k] = pc[r + k - 1]; k--
			:: else -> break
			od;
			pc[r + k] = v;
			/* whole? */
			j = 0;
			v = 0;
			cov = 0;
			do
			:: j < NW ->
				cov = cov | ((pc[r + j] >> 9) & 15);
				v = (v & ~511) | VADD(v, pc[r + j]) | (pc[r + j] & (F_ECN | F_GECN));
				j++
			:: else -> break
			od;
#ifdef BUG_FLAT_BITMAP
			cov = (cov == ALL -> ALL : 0);
#endif
			if
#ifdef RAWSEQ
			:: cov == ALL && ISRAW(c) ->
				/* the sum saturates: ask everybody for raw values */
				ps_is_raw = 1;
				j = 0;
				do
				:: j < NW -> pc[r + j] = 0; j++
				:: else -> break
				od;
				correction_request()
			:: cov == ALL && !ISRAW(c) ->
#else
			:: cov == ALL ->
#endif
				assert(TWICE(v) == 0); /* every worker once */
				assert(!(v & BAD)); /* nothing else */
				assert(EXACT(v)); /* every worker */
#ifdef BUG_PS_CLEARS_ECN
				v = v & ~F_ECN;
#endif
				x = (psidx >> SLOT(c)) & 1;
				hit = (pscol >> SLOT(c)) & 1 & (NIDX > 1);
				cache[SLOT(c)] = x | (hit << 1) | ((hit && x == 0) << 2) | (ECN(v) << 3) | (GECN(v) << 4);
				if
				:: hit -> psidx = psidx ^ (1 << SLOT(c))
				:: else
				fi;
				pscol = pscol & ~(1 << SLOT(c));
				j = 0;
				do
				:: j < NW -> pc[r + j] = 0; j++
				:: else -> break
				od;
				send_result(0, VAL(v));
				advance()
			:: else
			fi
		fi
	fi
}

// ---- the worker ----

/* The gradient of worker `who`, sequence `c`. */
inline gradient(flags) {
	q = (c << 22) | (1 << who) | ((1 << RACK(who)) << 12) | (((widx[who] >> SLOT(c)) & 1) << 28) | (flags);
	if
	:: TWO_LEVELS && IS_DIRECT(RACK(who)) ->
#ifdef BUG_LEVEL_NOT_IN_KEY
		q = q | (1 << 9);
#else
		q = q | (1 << 9) | F_EDGE; /* a rack of one enters level 1 directly */
#endif
		q = TO(q, N_X)
	:: TWO_LEVELS && !IS_DIRECT(RACK(who)) -> q = TO(q | (WBIT(who) << 9), 1 + RACK(who))
	:: else -> q = TO(q | (WBIT(who) << 9), N_X)
	fi;
#ifdef RAWSEQ
	if
	:: ISRAW(c) && ((w_raw >> who) & 1) -> q = (q | F_RAW) & ~(F_RES | F_COL)
	:: else
	fi;
#endif
	emit(q);
	printf("send"); describe(q)
}

inline handle_worker() {
	who = DST(p) - 4;
	lo = wbase[who];
	hi = (lo + W < nxt[who] -> lo + W : nxt[who]);
	resolve();
	if
	:: c == -1 -> skip
	:: c != -1 && ((got[who] >> (c - wbase[who])) & 1) -> skip
#ifdef RAWSEQ
	:: c != -1 && !((got[who] >> (c - wbase[who])) & 1) && RES(p) ->
		/* correction request */
		assert(ISRAW(c));
		w_raw = w_raw | (1 << who);
		x = who;
		gradient(0)
#endif
	:: else ->
		assert(c == SEQ(p)); /* the result of that sequence */
		assert(!((delivered[who] >> SEQ(p)) & 1)); /* once */
		assert(EXACT(p)); /* every worker once, nothing else */
		assert(!GECN(p) || ECN(p)); /* a mark survives to the ACK */
#ifdef RAWSEQ
		assert(!ISRAW(c) || RAW(p));
#endif
		delivered[who] = delivered[who] | (1 << SEQ(p));
		got[who] = got[who] | (1 << (c - wbase[who]));
		if
		:: COL(p) && !RAW(p) -> widx[who] = (widx[who] & ~(1 << SLOT(c))) | (NEWIDX(p) << SLOT(c)) /* in force from c + P */
		:: else
		fi;
		do
		:: got[who] & 1 -> got[who] = got[who] >> 1; wbase[who] = wbase[who] + 1
		:: else -> break
		od;
		calm()
	fi;
	who = 0
}

inline resend_oldest() {
	c = wbase[who];
	gradient(AGAIN)
}

inline deliver() {
	p = net[i];
	remove(i);
	printf("deliver"); describe(p);
	if
	:: IS_SWITCH(DST(p)) -> handle_switch()
	:: DST(p) == N_PS -> handle_ps()
	:: else -> handle_worker()
	fi;
	flush()
}

#define CAN_SEND(w) (nxt[w] < wbase[w] + W && nxt[w] < END)
#if NW == 2
#define NOBODY_SENDS (!CAN_SEND(0) && !CAN_SEND(1))
#define EVERYBODY_HAS_ALL (wbase[0] == END && wbase[1] == END)
#define NEEDY ((wbase[0] < END) | ((wbase[1] < END) << 1))
#elif NW == 3
#define NOBODY_SENDS (!CAN_SEND(0) && !CAN_SEND(1) && !CAN_SEND(2))
#define EVERYBODY_HAS_ALL (wbase[0] == END && wbase[1] == END && wbase[2] == END)
#define NEEDY ((wbase[0] < END) | ((wbase[1] < END) << 1) | ((wbase[2] < END) << 2))
#else
#define NOBODY_SENDS (!CAN_SEND(0) && !CAN_SEND(1) && !CAN_SEND(2) && !CAN_SEND(3))
#define EVERYBODY_HAS_ALL (wbase[0] == END && wbase[1] == END && wbase[2] == END && wbase[3] == END)
#define NEEDY ((wbase[0] < END) | ((wbase[1] < END) << 1) | ((wbase[2] < END) << 2) | ((wbase[3] < END) << 3))
#endif
#define OPEN(w) (wbase[w] < nxt[w])
#define SOMETHING_OPEN (OPEN(0) || OPEN(1) || (NW > 2 && OPEN(NW - 2)) || (NW > 2 && OPEN(NW - 1)))
#define FRESH(a) (agg[a] != 0 && !(agg[a] & A_AGED))
#if NS * NIDX == 1
#define SOMETHING_FRESH FRESH(0)
#elif NS * NIDX == 2
#define SOMETHING_FRESH (FRESH(0) || FRESH(1))
#elif NS * NIDX == 3
#define SOMETHING_FRESH (FRESH(0) || FRESH(1) || FRESH(2))
#elif NS * NIDX == 4
#define SOMETHING_FRESH (FRESH(0) || FRESH(1) || FRESH(2) || FRESH(3))
#else
#define SOMETHING_FRESH (FRESH(0) || FRESH(1) || FRESH(2) || FRESH(3) || FRESH(4) || FRESH(5))
#endif
#define QUIET (net[0] == 0 && NOBODY_SENDS)
#ifdef LOSS_AFTER_FIRST_HOP
#define MAY_LOSE(x) (loss > 0 && (ACK(x) || DST(x) == N_PS))
#else
#define MAY_LOSE(x) (loss > 0)
#endif

#define PICK(n) :: net[n] != 0 && (n == 0 || net[n] != net[(n == 0 -> 0 : n - 1)]) -> i = n

init {
	d_step {
		i = 0;
		do
		:: i < NW -> wbase[i] = START; nxt[i] = START; widx[i] = INDEXES; i++
		:: else -> break
		od;
		i = 0;
		do
		:: i < NS -> known[i] = 1; i++
		:: else -> break
		od;
		i = 0;
		psidx = INDEXES;
#ifdef FOREIGN_HOLDS_ALL
		do
		:: i < NS * NIDX -> agg[i] = A_VALID | A_FOREIGN | BAD; i++
		:: else -> break
		od;
		i = 0;
#endif
#ifdef BUG_NO_QUARANTINE
		/* a late gradient of worker 1, from the epoch before, which had the same job ID */
		c = START;
		who = 1;
		gradient(BAD);
		flush();
		who = 0;
#endif
	}
	do
	/* a packet arrives, is lost, is duplicated, is marked */
	:: atomic {
		net[0] != 0 && !finished ->
		if
		PICK(0)
		PICK(1)
		PICK(2)
		PICK(3)
		PICK(4)
		PICK(5)
		PICK(6)
		PICK(7)
		PICK(8)
		PICK(9)
		PICK(10)
		PICK(11)
#if NBAG > 12
		PICK(12)
		PICK(13)
		PICK(14)
		PICK(15)
#endif
		fi;
		if
		:: d_step { true -> deliver(); i = 0 }
		:: d_step { MAY_LOSE(net[i]) -> printf("lose"); describe(net[i]); loss--; remove(i); i = 0; calm() }
		:: d_step { dup > 0 -> printf("duplicate"); describe(net[i]); dup--; p = net[i]; insert(p); i = 0; calm() }
		:: d_step { mark > 0 && !ACK(net[i]) && !ECN(net[i]) ->
			printf("mark"); describe(net[i]);
			mark--;
			p = net[i] | F_ECN | F_GECN;
			remove(i);
			insert(p);
			i = 0;
			calm() }
		fi
	}
	/* a worker sends */
	:: atomic {
		!NOBODY_SENDS ->
		if
		:: CAN_SEND(0) -> who = 0
		:: CAN_SEND(1) -> who = 1
#if NW > 2
		:: CAN_SEND(2) -> who = 2
#endif
#if NW > 3
		:: CAN_SEND(3) -> who = 3
#endif
		fi;
		d_step { c = nxt[who]; gradient(0); nxt[who] = nxt[who] + 1; flush(); who = 0 }
	}
	/* a timer fires, or three ACKs came out of order, while packets are on their way: any sequence of the window */
	:: atomic {
		early > 0 && SOMETHING_OPEN ->
		if
		:: OPEN(0) -> who = 0
		:: OPEN(1) -> who = 1
#if NW > 2
		:: OPEN(2) -> who = 2
#endif
#if NW > 3
		:: OPEN(3) -> who = 3
#endif
		fi;
		if
		:: d_step { true -> c = wbase[who]; early--; gradient(AGAIN); flush(); who = 0; calm() }
		:: d_step { wbase[who] + 1 < nxt[who] && !(got[who] & 2) ->
			c = wbase[who] + 1; early--; gradient(AGAIN); flush(); who = 0; calm() }
#ifndef REPEATS_ONLY
		:: d_step { true -> c = wbase[who]; early--; gradient(F_COL); flush(); who = 0; calm() }
		:: d_step { wbase[who] + 1 < nxt[who] && !(got[who] & 2) ->
			c = wbase[who] + 1; early--; gradient(F_COL); flush(); who = 0; calm() }
#endif
		fi
	}
	/* nothing moves any more: timers fire, each worker once before any fires again */
	:: atomic {
		QUIET && !EVERYBODY_HAS_ALL ->
		if
		:: wbase[0] < END && !(fired & 1) -> who = 0
		:: wbase[1] < END && !(fired & 2) -> who = 1
#if NW > 2
		:: wbase[2] < END && !(fired & 4) -> who = 2
#endif
#if NW > 3
		:: wbase[3] < END && !(fired & 8) -> who = 3
#endif
		fi;
		d_step {
			printf("time-out of worker %d\n", who);
			fires++;
			assert(fires <= K); /* results keep coming */
			fired = fired | (1 << who);
			if
			:: (NEEDY & ~fired) == 0 -> fired = 0
			:: else
			fi;
			resend_oldest();
#ifdef RAWSEQ
			/* the PS's own timer asks again while raw gradients are missing */
			if
			:: ps_is_raw ->
				c = START + RAWSEQ;
#ifdef DOC_CORRECTION_TO_GROUP
				correction_request()
#else
				j = 0;
				do
				:: j < NW ->
					if
					:: !((ps_raw >> j) & 1) ->
						emit(TO(F_ACK | F_RES | F_EDGE | (c << 22) | (j << 9) | (((psidx >> SLOT(c)) & 1) << 28), N_X))
					:: else
					fi;
					j++
				:: else -> break
				od
#endif
			:: else
			fi;
#endif
			flush();
			who = 0
		}
	}
#if AGE > 0
	:: atomic {
		age > 0 && !finished && SOMETHING_FRESH ->
		if
		:: FRESH(0) -> i = 0
#if NS * NIDX > 1
		:: FRESH(1) -> i = 1
#endif
#if NS * NIDX > 2
		:: FRESH(2) -> i = 2
#endif
#if NS * NIDX > 3
		:: FRESH(3) -> i = 3
#endif
#if NS * NIDX > 4
		:: FRESH(4) -> i = 4
		:: FRESH(5) -> i = 5
#endif
		fi;
		d_step { printf("aggregator %d becomes stale\n", i); age--; agg[i] = agg[i] | A_AGED; i = 0; calm() }
	}
#endif
#if FOREIGN > 0
	/* another job takes an aggregator, and gives it back */
	:: atomic {
		!finished ->
		if
		:: true -> i = 0
#if NS * NIDX > 1
		:: true -> i = 1
#endif
#if NS * NIDX > 2
		:: true -> i = 2
#endif
#if NS * NIDX > 3
		:: true -> i = 3
#endif
#if NS * NIDX > 4
		:: true -> i = 4
		:: true -> i = 5
#endif
		fi;
		if
		:: d_step { foreign > 0 && (agg[i] == 0 || (agg[i] & A_AGED)) ->
			printf("another job takes aggregator %d\n", i);
			foreign--; agg[i] = A_VALID | A_FOREIGN | BAD; i = 0; calm() }
		:: d_step { (agg[i] & A_FOREIGN) -> printf("the other job releases aggregator %d\n", i); agg[i] = 0; i = 0; calm() }
		:: d_step { !(agg[i] & A_FOREIGN) && !(foreign > 0 && (agg[i] == 0 || (agg[i] & A_AGED))) -> i = 0 }
		fi
	}
#endif
#if RESET > 0
	:: atomic {
		!finished ->
		if
		:: true -> i = 0
#if NS > 1
		:: true -> i = 1
#endif
#if NS > 2
		:: true -> i = 2
#endif
		fi;
		if
		:: d_step { resets > 0 -> printf("switch %d loses its aggregators\n", i);
			resets--; c = 0;
			do
			:: c < NIDX -> agg[i * NIDX + c] = 0; c++
			:: else -> break
			od;
			i = 0; calm() }
		:: d_step { resets > 0 -> printf("switch %d loses its aggregators and tables\n", i);
			resets--; c = 0; known[i] = 0;
			do
			:: c < NIDX -> agg[i * NIDX + c] = 0; c++
			:: else -> break
			od;
			i = 0; calm() }
		:: d_step { resets > 0 && known[i] -> printf("switch %d loses its tables, its aggregators stay\n", i);
			resets--; known[i] = 0; i = 0; calm() }
		:: d_step { !known[i] -> printf("switch %d is programmed again\n", i); known[i] = 1; i = 0; calm() }
		:: d_step { known[i] && resets == 0 -> i = 0 }
		fi
	}
#endif
	/* the end */
	:: d_step { net[0] == 0 && EVERYBODY_HAS_ALL && !finished ->
		finished = 1;
		i = 0;
		do
		:: i < NS * NIDX ->
			g = agg[i];
			own = 0;
#ifdef NO_FAULTS
			assert(g == 0); /* released by the ACKs alone */
#endif
			if
			:: g != 0 -> g = g | A_AGED /* time passes T; then another job must be able to take it */
			:: else
			fi;
			assert(IS_FREE(g));
			agg[i] = 0;
			i++
		:: else -> break
		od;
		i = 0
	}
	:: finished -> break
	od
}
