/* Feeds the launcher's parts with hostile input, in one process, under sanitizers:
 *
 *     python packaging/launcher.py --fuzz 1000000
 *
 * Each input is an environment, a stdin, a text for an error, and the answer of an agent that cuts
 * it short, keeps silent, hangs up or lies about it. What must come out is computed a second time
 * here, in the plainest way.
 */
#define main launcher_main
int launcher_main(int, char **);
#include "istio-cni.c"
#undef main

#include <stdio.h>

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            fprintf(stderr, "fuzz: input %lu: not so: %s (line %d)\n", input, #holds, __LINE__);   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)
#define VARIABLES 12

static uint64_t state;
static unsigned long input;

static uint32_t below(uint32_t limit) /* xorshift64* */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (uint32_t)((state * UINT64_C(0x2545f4914f6cdd1d)) >> 32) % limit;
}

static uint32_t size_below(uint32_t limit) /* small ones mostly, and now and then any */
{
    static const uint32_t ends[] = {4, 40, 400, 4000};
    uint32_t end = below(64) == 0 ? limit : ends[below(4)];
    return below(end < limit ? end : limit);
}

static void fill(char *bytes, size_t size)
{
    static const char odd[] = "\"\\\n\x01\x7f\x80\xff=CNI_";
    for (size_t i = 0; i < size; i++)
        bytes[i] = below(2) ? odd[below(sizeof odd - 1)] : (char)(1 + below(255));
}

/* -- the environment --------------------------------------------------------------------------- */

static void check_environment(struct call *call)
{
    static const char *const heads[] = {"CNI_", "CNI", "CNI_COMMAND=", "CNI_ISTIO_FALLBACK=",
                                        "CNI_ISTIO_", "PATH=", "PATH", "LD_PRELOAD=", "", "cni_"};
    static char text[VARIABLES][2048], large[FRAME_ENVIRONMENT_MAX + 64];
    char *variables[VARIABLES + 2];
    size_t count = below(VARIABLES + 1), expected = 0, kept = 0;
    for (size_t i = 0; i < count; i++) {
        variables[i] = stpcpy(text[i], heads[below(10)]);
        size_t size = size_below((uint32_t)(text[i] + sizeof text[i] - variables[i]));
        fill(variables[i], size);
        variables[i][size] = '\0';
        variables[i] = text[i];
    }
    if (below(2048) == 0) { /* around the limit, alone or not */
        size_t size = FRAME_ENVIRONMENT_MAX - 8 + below(16);
        memset(large, 'x', size);
        memcpy(large, "CNI_LARGE=", 10);
        large[size] = '\0';
        variables[count++] = large;
    }
    variables[count] = NULL;
    call->variables = 0;
    gather(call, variables);
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        bool cni = memcmp(variables[i], "CNI_", 4) == 0;
        size_t size = cni ? strlen(variables[i]) + 1 : 0;
        if (cni && fits && expected + size <= FRAME_ENVIRONMENT_MAX) {
            CHECK(memcmp(call->payload + expected, variables[i], size) == 0);
            expected += size;
        } else if (cni) {
            fits = false;
        }
        if (cni ? strncmp(variables[i], "CNI_ISTIO_", 10) != 0
                : strncmp(variables[i], "PATH=", 5) == 0)
            CHECK(call->environment[kept++] == variables[i]);
    }
    CHECK(call->environment_fits == fits);
    CHECK(call->request.environment_size == expected);
    CHECK(call->variables == kept);
}

/* -- stdin ------------------------------------------------------------------------------------- */

static void check_stdin(struct call *call, char *bytes)
{
    uint32_t size = below(50000) == 0 ? FRAME_STDIN_MAX - 1 + below(4) : size_below(60000);
    int from = memfd_create("fuzz", MFD_CLOEXEC);
    fill(bytes, size < 64 ? size : 64);
    CHECK(from >= 0 && write_all(from, bytes, size, 0) && lseek(from, 0, SEEK_SET) == 0);
    if (below(1000) == 0) { /* not to be read at all */
        close(from);
        from = open("/", O_RDONLY | O_CLOEXEC);
        CHECK(!read_stdin(call, from));
    } else if (read_stdin(call, from)) {
        CHECK(size <= FRAME_STDIN_MAX && call->request.stdin_size == size);
        CHECK(memcmp(call->payload + call->request.environment_size, bytes, size) == 0);
    } else {
        CHECK(size > FRAME_STDIN_MAX);
        call->request.stdin_size = 0;
    }
    close(from);
}

/* -- texts ------------------------------------------------------------------------------------- */

static void check_quote(void)
{
    char text[512], quoted[600];
    size_t size = below(sizeof text), room = 1 + below(sizeof quoted - 1);
    fill(text, size);
    text[size < sizeof text ? size : size - 1] = '\0';
    char *end = quote(quoted, quoted + room, text);
    CHECK(end <= quoted + room);
    const char *from = text;
    for (const char *at = quoted; at < end; from++) {
        unsigned byte = (uint8_t)*from, code;
        CHECK((uint8_t)*at >= 0x20 && (uint8_t)*at < 0x7f && *at != '"');
        if (at[0] == '\\' && at[1] == 'u') {
            CHECK(sscanf(at + 2, "%4x", &code) == 1);
            CHECK(code == (byte >= 0x80 ? 0xfffd : byte));
            at += 6;
        } else {
            at += *at == '\\';
            CHECK((uint8_t)*at++ == byte);
        }
    }
    CHECK(*from == '\0' || room - (size_t)(end - quoted) <= 6);
}

/* -- an agent ---------------------------------------------------------------------------------- */

struct plan { /* what the agent will do */
    struct frame_reply reply;
    size_t sent; /* bytes of reply and answer */
    bool hangs_up;
    bool reads;
};

static struct plan scheme(char *answer)
{
    struct plan plan = {.reply = {.version = (uint16_t)below(3), .status = (uint8_t)below(256)}};
    plan.reply.kind = (uint8_t)(below(8) ? 1 + below(2) : below(256));
    plan.reply.size = size_below(30000);
    size_t whole = sizeof plan.reply + plan.reply.size;
    fill(answer, plan.reply.size);
    if (plan.reply.size > 0 && below(8) == 0)
        answer[below(plan.reply.size)] = '\0';
    plan.sent = below(3) ? whole : below((uint32_t)whole + 1);
    if (below(16) == 0) /* a lie */
        plan.reply.size = below(2) ? FRAME_ANSWER_MAX - 2 + below(4) : below(UINT32_MAX);
    plan.hangs_up = below(16) != 0;
    plan.reads = below(2) == 0;
    return plan;
}

static void send_answer(int end, const struct plan *plan, char *answer)
{
    struct frame_reply reply = plan->reply;
    size_t head = plan->sent < sizeof reply ? plan->sent : sizeof reply;
    struct iovec pieces[] = {{&reply, head}, {answer, plan->sent - head}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.header), &end, sizeof end);
    if (below(8) == 0) { /* a descriptor that nobody asked for */
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
    }
    if (plan->sent > 0)
        CHECK(sendmsg(end, &message, MSG_NOSIGNAL) == (ssize_t)plan->sent);
}

static void check_frame(struct call *call, int end, size_t count)
{
    static char got[FRAME_ENVIRONMENT_MAX + FRAME_STDIN_MAX + 64];
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(8 * sizeof(int))];
    } control;
    struct iovec rest = {got, sizeof got};
    struct msghdr message = {.msg_iov = &rest, .msg_iovlen = 1, .msg_control = &control,
                             .msg_controllen = sizeof control};
    ssize_t size = recvmsg(end, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0)
        return; /* nothing of it came in time */
    size_t whole = sizeof call->request + call->request.environment_size + call->request.stdin_size;
    CHECK((size_t)size <= whole && memcmp(got, call, (size_t)size) == 0);
    CHECK(message.msg_controllen > 0 && control.header.cmsg_len == CMSG_LEN(count * sizeof(int)));
    for (size_t i = 0; i < count; i++) {
        int descriptor;
        memcpy(&descriptor, CMSG_DATA(&control.header) + i * sizeof(int), sizeof descriptor);
        close(descriptor);
    }
}

static void check_exchange(struct call *call, char *answer)
{
    struct plan plan = scheme(answer);
    int ends[2], descriptors[] = {STDIN_FILENO, STDERR_FILENO};
    size_t count = 1 + below(2), size = call->request.environment_size + call->request.stdin_size;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    send_answer(ends[1], &plan, answer);
    if (plan.hangs_up) /* for now only what it says: what it was sent is still looked at */
        CHECK(shutdown(ends[1], plan.reads ? SHUT_WR : SHUT_RDWR) == 0);
    /* What the socket does not hold stays unread; then, too, the end is to come by the deadline. */
    bool ends_itself = plan.hangs_up && (!plan.reads || size < 65536);
    call->request.deadline_ns = now_ns() + (ends_itself ? 60000 * MS : MS / 20);
    memset(call->reason, 0x7f, sizeof call->reason);
    bool answered = exchange(call, ends[0], descriptors, count);
    if (plan.reads || !plan.hangs_up)
        check_frame(call, ends[1], count);
    close(ends[0]);
    close(ends[1]);

    bool sound = plan.reply.version > 0 && plan.reply.size <= FRAME_ANSWER_MAX &&
                 (plan.reply.kind == FRAME_DONE || plan.reply.kind == FRAME_DECLINED);
    bool whole = sound && plan.sent >= sizeof plan.reply + plan.reply.size;
    if (answered) {
        CHECK(whole && plan.reply.kind == FRAME_DONE);
        CHECK(memcmp(call->answer, answer, plan.reply.size) == 0);
        CHECK(call->reply.status == plan.reply.status && call->reply.size == plan.reply.size);
        return;
    }
    CHECK(memchr(call->reason, '\0', sizeof call->reason) != NULL);
    const char *word = plan.sent < sizeof plan.reply ? "died: "
                       : !sound                      ? "garbled: "
                       : !whole                      ? "died: "
                                                     : "declined: ";
    bool late = strncmp(call->reason, "timeout: ", 9) == 0;
    CHECK(late ? !ends_itself : strncmp(call->reason, word, strlen(word)) == 0);
    CHECK(late || !whole || plan.reply.kind == FRAME_DECLINED);
    if (!late && whole) {
        size_t head = strlen(word), room = sizeof call->reason - 1 - head;
        size_t text = strnlen(answer, plan.reply.size < room ? plan.reply.size : room);
        CHECK(strlen(call->reason) == head + text);
        CHECK(memcmp(call->reason + head, answer, text) == 0);
    }
}

int main(int argc, char **argv)
{
    unsigned long inputs = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, start = now_ns();
    struct call *call = calloc(1, sizeof *call + (VARIABLES + 2 + OWN_VARIABLES) * sizeof(char *));
    char *bytes = calloc(1, FRAME_STDIN_MAX + 8);
    if (call == NULL || bytes == NULL || dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO) != 1)
        return 1;
    state = seed * 2 + 1;
    for (input = 0; input < inputs; input++) {
        check_environment(call);
        check_stdin(call, bytes);
        check_quote();
        check_exchange(call, bytes);
    }
    free(call);
    free(bytes);
    fprintf(stderr, "fuzz: %lu inputs, seed %llu, %.1f s: all as it should be\n", inputs,
            (unsigned long long)seed, (double)(now_ns() - start) / 1e9);
    return 0;
}
