/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The switch as a plain UDP relay, for machines where nothing may be loaded into the kernel. Ports are IPv4 addresses:
 * hosts send to the relay as if it were the PS, and it forwards gradients to the job's PS and ACKs to its group.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "native.h"

#define RELAY_BATCH 64u
#define RELAY_BUFFER 4096u /* more than the largest profile */
#define RELAY_SOCKET_BUFFER (8 << 20)

struct atp_relay {
    struct atp_packet_source source; /* first */
    struct atp_switch *sw;
    pthread_t thread;
    int socket;
    int stop;
    uint32_t address;
    uint16_t port;
    uint8_t buffer[RELAY_BATCH][RELAY_BUFFER];
    /* Packets to send: they point into the buffers of the batch. */
    struct mmsghdr out[RELAY_BATCH];
    struct iovec out_data[RELAY_BATCH];
    struct sockaddr_in out_to[RELAY_BATCH];
    uint32_t queued;
};

static void relay_flush(struct atp_relay *r) {
    uint32_t sent = 0;

    while (sent < r->queued) {
        int n = sendmmsg(r->socket, r->out + sent, r->queued - sent, 0);
        if (n > 0)
            sent += (uint32_t)n;
        else if (errno != EINTR)
            sent++; /* that destination refuses: the transport resends */
    }
    r->queued = 0;
}

static void relay_forward(void *context, uint32_t egress_port, uint32_t dst_ip, uint16_t dst_port,
                          const uint8_t *payload, size_t length, int ecn) {
    struct atp_relay *r = context;
    uint32_t i, to;

    (void)ecn; /* it is in the header */
    /* A replica's address, else the port towards the PS, which is an address too. */
    to = dst_ip != 0 && dst_ip != r->address ? dst_ip : egress_port;
    if (to == 0 || to == r->address) {
        /* A job that this relay does not know was sent to the relay itself: only its hosts know their PS. */
        atp_native_count(r->sw, 0, ATP_C_DROPPED_NO_ROUTE, 1);
        return;
    }
    if (r->queued == RELAY_BATCH)
        relay_flush(r);
    i = r->queued++;
    r->out_data[i] = (struct iovec){.iov_base = (void *)(uintptr_t)payload, .iov_len = length};
    r->out_to[i] = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(to), .sin_port = htons(dst_port ? dst_port : r->port)};
    r->out[i].msg_hdr = (struct msghdr){
        .msg_name = &r->out_to[i], .msg_namelen = sizeof(r->out_to[i]), .msg_iov = &r->out_data[i], .msg_iovlen = 1};
}

static int congestion_mark(struct msghdr *message) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c != NULL; c = CMSG_NXTHDR(message, c))
        if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TOS)
            return (*CMSG_DATA(c) & IPTOS_ECN_MASK) == IPTOS_ECN_CE;
    return 0;
}

static void *relay_run(void *context) {
    struct atp_relay *r = context;
    struct mmsghdr in[RELAY_BATCH];
    struct iovec data[RELAY_BATCH];
    struct sockaddr_in from[RELAY_BATCH];
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control[RELAY_BATCH];
    struct pollfd wait[2] = {{.fd = r->socket, .events = POLLIN}, {.fd = r->stop, .events = POLLIN}};

    for (;;) {
        int count;

        for (uint32_t i = 0; i < RELAY_BATCH; i++) {
            data[i] = (struct iovec){.iov_base = r->buffer[i], .iov_len = RELAY_BUFFER};
            in[i].msg_hdr = (struct msghdr){.msg_name = &from[i],
                                            .msg_namelen = sizeof(from[i]),
                                            .msg_iov = &data[i],
                                            .msg_iovlen = 1,
                                            .msg_control = &control[i],
                                            .msg_controllen = sizeof(control[i])};
        }
        count = recvmmsg(r->socket, in, RELAY_BATCH, MSG_DONTWAIT, NULL);
        if (count <= 0) {
            /* Errors of a datagram socket are reports on single datagrams (a port that refuses): go on. */
            if (poll(wait, 2, -1) < 0 && errno != EINTR)
                return NULL;
            if (wait[1].revents != 0)
                return NULL;
            continue;
        }
        pthread_mutex_lock(&r->sw->lock);
        for (int i = 0; i < count; i++) {
            uint64_t now_ns = atp_native_now(r->sw);
            /* A datagram cut at RELAY_BUFFER is longer than any profile, and is rejected for its length. */
            (void)atp_native_packet(r->sw, ntohl(from[i].sin_addr.s_addr), r->address, congestion_mark(&in[i].msg_hdr),
                                    r->buffer[i], in[i].msg_len, now_ns, relay_forward, r);
        }
        pthread_mutex_unlock(&r->sw->lock);
        relay_flush(r);
    }
}

static int relay_socket(uint32_t address, uint16_t port) {
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address), .sin_port = htons(port)};
    const int on = 1;
    const int buffer = RELAY_SOCKET_BUFFER;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof(buffer));
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof(buffer));
    if (setsockopt(fd, SOL_SOCKET, SO_NO_CHECK, &on, sizeof(on)) != 0 ||
        setsockopt(fd, IPPROTO_IP, IP_RECVTOS, &on, sizeof(on)) != 0 ||
        bind(fd, (const struct sockaddr *)&own, sizeof(own)) != 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

static void relay_free(struct atp_relay *r) {
    if (r->socket >= 0)
        close(r->socket);
    if (r->stop >= 0)
        close(r->stop);
    free(r);
}

static struct atp_relay *relay_of(const struct atp_switch *sw) {
    return (struct atp_relay *)(void *)sw->native->source;
}

static void relay_stop(struct atp_switch *sw) {
    struct atp_relay *r = relay_of(sw);
    const uint64_t one = 1;

    while (write(r->stop, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
    pthread_join(r->thread, NULL);
    pthread_mutex_lock(&sw->lock);
    sw->native->source = NULL;
    pthread_mutex_unlock(&sw->lock);
    relay_free(r);
}

ATP_EXPORT int atp_relay_start(struct atp_switch *sw, uint32_t address, uint16_t port) {
    struct atp_relay *r;
    int result;

    if (sw->native == NULL)
        return -ENOTSUP;
    if (address == 0 || port == 0)
        return -EINVAL;
    if (sw->native->source != NULL)
        return -EALREADY;
    r = calloc(1, sizeof(*r));
    if (r == NULL)
        return -ENOMEM;
    r->source.stop = relay_stop;
    r->sw = sw;
    r->address = address;
    r->port = port;
    r->stop = eventfd(0, EFD_CLOEXEC);
    r->socket = relay_socket(address, port);
    if (r->stop < 0 || r->socket < 0) {
        result = r->socket < 0 ? r->socket : -EMFILE;
        relay_free(r);
        return result;
    }
    pthread_mutex_lock(&sw->lock);
    sw->native->source = &r->source;
    pthread_mutex_unlock(&sw->lock);
    result = pthread_create(&r->thread, NULL, relay_run, r);
    if (result != 0) {
        sw->native->source = NULL;
        relay_free(r);
        return -result;
    }
    return 0;
}

ATP_EXPORT int atp_relay_stop(struct atp_switch *sw) {
    if (sw->native == NULL)
        return -ENOTSUP;
    if (sw->native->source == NULL)
        return -ENOENT;
    relay_stop(sw);
    return 0;
}
