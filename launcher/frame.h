/* What launcher and node agent say to each other: the one description of it.
 *
 * The launcher includes this file; the agent's side is src/istio_cni/agent/frame.py. Tests hold both
 * against the numbers here, and the layout of the two structures against examples in bytes.
 *
 * One connection to the agent's Unix stream socket is one call. Both ends are programs of the same
 * machine, so numbers are in its byte order; there is no padding.
 *
 *   launcher                                     agent
 *     struct frame_request ──────────────────────>   with the first byte of it, as SCM_RIGHTS, the
 *     environment, environment_size bytes            descriptors: that of CNI_NETNS, unless
 *     stdin, stdin_size bytes                        netns_error says why there is none; then the
 *                                                    launcher's own network namespace
 *     struct frame_reply <────────────────────────
 *     size bytes <────────────────────────────────   stdout of the call, or why it was declined
 *
 * The environment is `NAME=value` with a NUL after each, and holds the variables that begin with
 * CNI_ and no others.
 *
 * Whoever closes the connection before the reply is whole has given the call up: a launcher that did
 * is about to run the plugin itself, so the agent must not touch the pod any more. A call that is
 * declined has touched nothing. A version that the agent does not speak is declined.
 */
#ifndef FRAME_H
#define FRAME_H

#include <stdint.h>

#define FRAME_MAGIC 0x494e4349 /* "ICNI" on a little-endian machine */
#define FRAME_VERSION 1
#define FRAME_ENVIRONMENT_MAX 1048576 /* bytes */
#define FRAME_STDIN_MAX 16777216      /* bytes */
#define FRAME_ANSWER_MAX 16842752     /* bytes: an ADD passes on what it got, and a little more */

#define FRAME_WAIT_ADD_MS 10000 /* how long a launcher waits for the whole of it, by verb */
#define FRAME_WAIT_CHECK_MS 5000
#define FRAME_WAIT_DEL_MS 2000
#define FRAME_WAIT_GC_MS 2000
#define FRAME_WAIT_MS 500 /* any other one */

#define FRAME_DONE 1     /* carried out: print the bytes, exit with the status */
#define FRAME_DECLINED 2 /* untouched: the bytes say why, for people */

struct frame_request { /* 40 bytes */
    uint32_t magic;
    uint16_t version;
    uint16_t netns_error; /* 0, or the errno of opening CNI_NETNS; ENOENT also for none or "" */
    uint8_t request_id[16]; /* random; in logs as 32 hex digits */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC: when the launcher stops waiting */
    uint32_t environment_size;
    uint32_t stdin_size;
};

struct frame_reply { /* 8 bytes */
    uint32_t size;
    uint16_t version; /* the agent's */
    uint8_t kind;
    uint8_t status; /* exit status of a call that is done */
};

#endif
