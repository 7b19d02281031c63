/* istio-cni: what the runtime starts for every pod and verb. It hands the call to the node agent;
 * where no agent answers, the plugin's bundle beside it runs in its place.
 *
 * It takes a twentieth of the time that a Python process takes to its first line. It needs nothing
 * of the node's, not even a libc, reads the meaning of two variables only, and leaves stdin, answers
 * and errors to the plugin. docs/launcher.md tells what it does, in order.
 */
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "frame.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U /* Linux 6.3 */
#endif

#define ABOUT                                                                                      \
    "istio-cni " VERSION ": captures pod traffic for a service mesh; a chained CNI plugin\n"       \
    "CNI protocol versions supported: " PROTOCOLS "\n"
#define SOCKET "istio-cni.d/agent.sock" /* beside this program, as is the bundle */
#define BUNDLES "istio-cni.d/"
#define LIBC "/libc" /* in the bundle's _internal, as packaging/portable.py makes it */
#define LOADER LIBC "/ld-bundled.so.1"
#define MS UINT64_C(1000000)
#define PRINT_NS (5000 * MS) /* for a reader of ours that does not take what it asked for */
#define OWN_VARIABLES 7
#define DIGITS_OF(number) #number
#define DIGITS(number) DIGITS_OF(number)

struct call {
    struct frame_request request;
    char payload[FRAME_ENVIRONMENT_MAX + FRAME_STDIN_MAX + 1]; /* one more, to notice too much */
    struct frame_reply reply;
    char answer[FRAME_ANSWER_MAX + 1]; /* and a NUL */
    char reason[256];                  /* why the agent did not do it: "word: text" */
    char directory[PATH_MAX];          /* of this program, up to the last slash */
    char target[PATH_MAX];             /* of the link to the bundle */
    char strings[16 * PATH_MAX];       /* seven paths of both these, one of one, and names */
    bool environment_fits;
    size_t variables;
    char *environment[]; /* of the bundle */
};

_Static_assert(sizeof(struct frame_request) == 40, "no padding");
_Static_assert(sizeof(struct frame_reply) == 8, "no padding");
_Static_assert(offsetof(struct call, payload) == 40, "a frame is one piece of memory");

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 * MS + (uint64_t)now.tv_nsec;
}

/* Waits until the descriptor is ready, or broken: what is tried next tells which. */
static bool await(int fd, short events, uint64_t deadline_ns)
{
    for (uint64_t now; (now = now_ns()) < deadline_ns;) {
        struct pollfd wanted = {.fd = fd, .events = events};
        struct timespec left = {
            .tv_sec = (time_t)((deadline_ns - now) / (1000 * MS)),
            .tv_nsec = (long)((deadline_ns - now) % (1000 * MS)),
        };
        int ready = ppoll(&wanted, 1, &left, NULL);
        if (ready > 0)
            return true;
        if (ready < 0 && errno != EINTR)
            return false;
    }
    return false;
}

static bool write_all(int fd, const char *bytes, size_t size, uint64_t deadline_ns)
{
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        if (written >= 0) {
            bytes += written;
            size -= (size_t)written;
        } else if (errno == EAGAIN) {
            if (!await(fd, POLLOUT, deadline_ns))
                return false;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

/* The last thing this program does: a bundle that is still to run would inherit what is ignored. */
static bool print(int fd, const char *bytes, size_t size)
{
    signal(SIGPIPE, SIG_IGN);
    return write_all(fd, bytes, size, now_ns() + PRINT_NS);
}

static char *write_hex(char *end, const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        *end++ = "0123456789abcdef"[bytes[i] >> 4];
        *end++ = "0123456789abcdef"[bytes[i] & 15];
    }
    *end = '\0';
    return end;
}

/* Writes a text as part of a JSON string, as long as there is room. Of a byte that is not ASCII
 * nothing is known; it is shown as U+FFFD. */
static char *quote(char *end, const char *limit, const char *text)
{
    for (; *text != '\0' && limit - end > 6; text++) {
        uint8_t byte = (uint8_t)*text;
        if (byte >= 0x80) {
            end = stpcpy(end, "\\ufffd");
        } else if (byte < 0x20 || byte == 0x7f) {
            end = write_hex(stpcpy(end, "\\u00"), &byte, 1);
        } else {
            if (byte == '"' || byte == '\\')
                *end++ = '\\';
            *end++ = (char)byte;
        }
    }
    return end;
}

/* Prints the error object of a failed call, in the form that cni/serve.py gives it. */
static int refuse(const char *const *parts)
{
    static const char tail[] = "\"\n}";
    char text[8192];
    char *end = stpcpy(text, "{\n    \"cniVersion\": \"" NEWEST_PROTOCOL "\",\n    \"code\": 5,\n"
                             "    \"msg\": \"");
    for (; *parts != NULL; parts++)
        end = quote(end, text + sizeof text - sizeof tail, *parts);
    end = stpcpy(end, tail);
    print(STDOUT_FILENO, text, (size_t)(end - text));
    return 1;
}

/* Else the next file to be opened would be read or printed to in the place of a closed one. */
static void open_standard_descriptors(void)
{
    for (int fd = 0; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0)
            open("/", O_PATH); /* no /dev: as good as closed, but taken */
}

/* Finds the part of this program's path that ends with the last slash; "" is the working one. */
static void find_directory(char *directory)
{
    ssize_t size = readlink("/proc/self/exe", directory, PATH_MAX - 1);
    if (size <= 0 || directory[0] != '/') { /* no /proc, or a file outside our root */
        const char *path = (const char *)getauxval(AT_EXECFN);
        size = path == NULL ? 0 : (ssize_t)strnlen(path, PATH_MAX - 1);
        memcpy(directory, path == NULL ? "" : path, (size_t)size);
    }
    while (size > 0 && directory[size - 1] != '/')
        size--;
    directory[size] = '\0';
}

/* Takes what of our environment the agent gets, and what the bundle gets. Loader, interpreter and
 * OpenSSL obey variables, and a runtime's are not meant for us: none of those goes on. */
static void gather(struct call *call, char *const *variables)
{
    size_t size = 0;
    call->environment_fits = true;
    for (; *variables != NULL; variables++) {
        if (strncmp(*variables, "CNI_", 4) == 0) {
            size_t length = strlen(*variables) + 1;
            call->environment_fits &= length <= FRAME_ENVIRONMENT_MAX - size;
            if (call->environment_fits) {
                memcpy(call->payload + size, *variables, length);
                size += length;
            }
            if (strncmp(*variables, "CNI_ISTIO_", 10) == 0)
                continue; /* said by this program only */
        } else if (strncmp(*variables, "PATH=", 5) != 0) {
            continue;
        }
        call->environment[call->variables++] = *variables;
    }
    call->request.environment_size = (uint32_t)size;
}

/* Reads stdin to its end, or prints why that is not possible. */
static bool read_stdin(struct call *call, int fd)
{
    char *start = call->payload + call->request.environment_size;
    for (size_t size = 0; size <= FRAME_STDIN_MAX;) {
        ssize_t got = read(fd, start + size, FRAME_STDIN_MAX + 1 - size);
        if (got == 0) {
            call->request.stdin_size = (uint32_t)size;
            return true;
        }
        if (got > 0) {
            size += (size_t)got;
        } else if (errno == EAGAIN) {
            await(fd, POLLIN, UINT64_MAX);
        } else if (errno != EINTR) {
            refuse((const char *[]){"cannot read the network configuration from stdin: ",
                                    strerror(errno), NULL});
            return false;
        }
    }
    refuse((const char *[]){"the network configuration on stdin has more than ",
                            DIGITS(FRAME_STDIN_MAX), " bytes", NULL});
    return false;
}

/* Notes why the bundle has to run. The words are few, since people count them. */
static bool give_up(struct call *call, const char *word, const char *text)
{
    char *end = stpcpy(stpcpy(call->reason, word), ": ");
    while (*text != '\0' && end < call->reason + sizeof call->reason - 1)
        *end++ = *text++;
    *end = '\0';
    return false;
}

/* Connects to the agent, if there is one that may be trusted. The link, or what it leads to, may be
 * longer than a socket's address: it is opened first, and the address is that of the descriptor. */
static bool reach(struct call *call, int agent)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct ucred peer = {.uid = UINT_MAX};
    socklen_t size = sizeof peer;
    char digits[12] = "", *digit = digits + sizeof digits - 1;
    stpcpy(stpcpy(call->strings, call->directory), SOCKET);
    int place = open(call->strings, O_PATH | O_CLOEXEC);
    if (place < 0)
        return give_up(call, "absent", strerror(errno));
    for (int rest = place; rest > 0; rest /= 10) /* 0 is stdin */
        *--digit = (char)('0' + rest % 10);
    stpcpy(stpcpy(address.sun_path, "/proc/self/fd/"), digit);
    if (connect(agent, (const struct sockaddr *)&address, sizeof address) != 0)
        return give_up(call, errno == EAGAIN ? "busy" : "absent", strerror(errno));
    if (getsockopt(agent, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != 0)
        return give_up(call, "untrusted", "what listens there is not root's");
    return true;
}

/* Sends the frame, with the descriptors beside its first byte. */
static bool send_frame(struct call *call, int agent, const int *descriptors, size_t count)
{
    const struct frame_request *request = &call->request;
    size_t size = sizeof *request + request->environment_size + request->stdin_size;
    union {
        struct cmsghdr header; /* aligns the bytes */
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {.header = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS}};
    control.header.cmsg_len = (socklen_t)CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(&control.header), descriptors, count * sizeof(int));
    for (size_t sent = 0; sent < size;) {
        struct iovec rest = {.iov_base = (char *)call + sent, .iov_len = size - sent};
        struct msghdr message = {.msg_iov = &rest, .msg_iovlen = 1};
        if (sent == 0) {
            message.msg_control = &control;
            message.msg_controllen = (socklen_t)CMSG_SPACE(count * sizeof(int));
        }
        if (!await(agent, POLLOUT, request->deadline_ns))
            return give_up(call, "timeout", "it did not read the call in time");
        ssize_t taken = sendmsg(agent, &message, MSG_NOSIGNAL);
        if (taken > 0)
            sent += (size_t)taken;
        else if (errno == EPIPE || errno == ECONNRESET)
            return true; /* it may have declined before it had read all */
        else if (errno != EAGAIN && errno != EINTR)
            return give_up(call, "unfit", strerror(errno));
    }
    return true;
}

static bool receive(struct call *call, int agent, void *bytes, size_t size)
{
    for (size_t got = 0; got < size;) {
        if (!await(agent, POLLIN, call->request.deadline_ns))
            return give_up(call, "timeout", "it did not answer in time");
        ssize_t more = recv(agent, (char *)bytes + got, size - got, 0);
        if (more > 0)
            got += (size_t)more;
        else if (more == 0 || (errno != EAGAIN && errno != EINTR))
            return give_up(call, "died", "the connection ended before a whole answer");
    }
    return true;
}

/* Sends the call and receives the whole answer, all of it before the deadline. */
static bool exchange(struct call *call, int agent, const int *descriptors, size_t count)
{
    struct frame_reply *reply = &call->reply;
    if (!send_frame(call, agent, descriptors, count) || !receive(call, agent, reply, sizeof *reply))
        return false;
    if (reply->version == 0 || reply->size > FRAME_ANSWER_MAX ||
        (reply->kind != FRAME_DONE && reply->kind != FRAME_DECLINED))
        return give_up(call, "garbled", "its answer has a form that is not known");
    if (!receive(call, agent, call->answer, reply->size))
        return false;
    call->answer[reply->size] = '\0';
    return reply->kind == FRAME_DONE || give_up(call, "declined", call->answer);
}

static uint64_t patience_ns(const char *command)
{
    static const struct {
        const char *command;
        uint64_t ms;
    } known[] = {{"ADD", FRAME_WAIT_ADD_MS},
                 {"CHECK", FRAME_WAIT_CHECK_MS},
                 {"DEL", FRAME_WAIT_DEL_MS},
                 {"GC", FRAME_WAIT_GC_MS}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(command, known[i].command) == 0)
            return known[i].ms * MS;
    return FRAME_WAIT_MS * MS; /* STATUS, VERSION, and what the agent refuses without any work */
}

/* Fills in the rest of the frame, opens what is sent with it, and asks. */
static bool consult(struct call *call, int agent)
{
    const char *netns = getenv("CNI_NETNS");
    if (!call->environment_fits)
        return give_up(call, "unfit",
                       "the CNI_ variables have more than " DIGITS(FRAME_ENVIRONMENT_MAX) " bytes");
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (own < 0)
        return give_up(call, "unfit", strerror(errno));
    /* The path may be anything: a FIFO is not waited for, a terminal does not become ours. */
    int target = open(netns == NULL ? "" : netns, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    call->request.netns_error = target < 0 ? (uint16_t)errno : 0;
    const int descriptors[] = {target, own};
    const size_t missing = target < 0;
    return exchange(call, agent, descriptors + missing, 2 - missing);
}

static bool ask(struct call *call, const char *command)
{
    struct frame_request *request = &call->request;
    const uint64_t now = now_ns();
    const pid_t pid = getpid();
    request->magic = FRAME_MAGIC;
    request->version = FRAME_VERSION;
    request->deadline_ns = now + patience_ns(command);
    if (getrandom(request->request_id, sizeof request->request_id, GRND_NONBLOCK) < 0) {
        memcpy(request->request_id, &now, sizeof now); /* unique on this node will do */
        memcpy(request->request_id + sizeof now, &pid, sizeof pid);
    }
    int agent = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (agent < 0)
        return give_up(call, "unfit", strerror(errno));
    bool answered = reach(call, agent) && consult(call, agent);
    close(agent); /* before all else: an agent that still works on the call stops now */
    return answered;
}

/* Makes a file of what was read from stdin, and that the new stdin. It must not block: where there
 * are no files in memory, a pipe that takes all of it. */
static bool restore_stdin(const struct call *call)
{
    const char *bytes = call->payload + call->request.environment_size;
    const size_t size = call->request.stdin_size;
    int ends[2];
    ends[0] = ends[1] = memfd_create("stdin", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    if (ends[0] < 0)
        ends[0] = ends[1] = memfd_create("stdin", MFD_CLOEXEC);
    if (ends[0] < 0 && pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0)
        fcntl(ends[1], F_SETPIPE_SZ, (int)size);
    if (ends[0] < 0 || !write_all(ends[1], bytes, size, 0))
        return false;
    lseek(ends[0], 0, SEEK_SET); /* a pipe has no place, and needs none */
    return dup2(ends[0], STDIN_FILENO) == STDIN_FILENO;
}

/* Writes texts one after the other, as one string. */
static char *join(char **room, const char *first, const char *second, const char *third)
{
    char *string = *room;
    *room = stpcpy(stpcpy(stpcpy(string, first), second), third) + 1;
    return string;
}

/* Runs the bundle in the place of this program; else returns what it lacks, and sets errno. */
static const char *run_bundle(struct call *call)
{
    char *room = call->strings, *target = call->target, id[33];
    char cache[] = "--inhibit-cache", path[] = "--library-path";
    /* The link is swapped by upgrades. It is read once, so that all parts are of one version. */
    char *current = join(&room, call->directory, BUNDLES, "current");
    ssize_t size = readlink(current, target, PATH_MAX - 1);
    if (size < 0) /* none, or a directory, which no upgrade could replace in one step */
        return current;
    target[size] = '\0';
    const bool absolute = target[0] == '/';
    char *bundle = join(&room, absolute ? "" : call->directory, absolute ? "" : BUNDLES, target);
    char *program = join(&room, bundle, "/istio-cni", "");
    char *internal = join(&room, bundle, "/_internal", "");
    char *loader = join(&room, internal, LOADER, "");
    char *libraries = join(&room, internal, LIBC ":", internal);
    write_hex(id, call->request.request_id, sizeof call->request.request_id);

    const char *const own[OWN_VARIABLES][2] = {
        {"CNI_ISTIO_FALLBACK=", call->reason},
        {"CNI_ISTIO_REQUEST_ID=", id},
        {"OPENSSL_CONF=", "/dev/null"}, /* the node's is for another OpenSSL */
        {"TZ=", "/dev/null"},           /* nor is its time zone asked for */
        /* Started by its own loader, PyInstaller's program need not start anew to find its
         * libraries: this is what it sets when it does (6.22.3, bootloader/src/pyi_main.c). */
        {"_PYI_ARCHIVE_FILE=", program},
        {"_PYI_LINUX_PROCESS_NAME=", "istio-cni"},
        {"_PYI_PARENT_PROCESS_LEVEL=", "-1"},
    };
    const size_t without_loader = 4;
    char **variable = call->environment + call->variables;
    for (size_t i = 0; i < OWN_VARIABLES; i++)
        variable[i] = join(&room, own[i][0], own[i][1], "");

    if (access(program, X_OK) != 0) /* the loader would say so in its own way */
        return program;
    if (!restore_stdin(call))
        return "stdin";
    execve(loader, (char *[]){loader, cache, path, libraries, program, NULL}, call->environment);
    if (errno != ENOENT)
        return loader;
    variable[without_loader] = NULL; /* not frozen: a development install */
    execve(program, (char *[]){program, NULL}, call->environment);
    return program;
}

/* Nothing can be undone without a bundle, and a DEL that fails keeps the pod from going away. */
static int fail(const struct call *call, const char *command, const char *missing)
{
    const char *why = strerror(errno);
    if (strcmp(command, "DEL") == 0 || strcmp(command, "GC") == 0)
        return 0;
    return refuse((const char *[]){
        "istio-cni: the plugin's bundle cannot be started: ", missing, ": ", why,
        "; the node agent was asked first: ", call->reason,
        "; the node agent's installer puts the bundle back when it starts", NULL});
}

int main(int argc, char **argv)
{
    static const char version[] = "istio-cni " VERSION "\n", about[] = ABOUT;
    open_standard_descriptors();
    if (argc == 2 && strcmp(argv[1], "--version") == 0)
        return print(STDOUT_FILENO, version, sizeof version - 1) ? 0 : 1;
    const char *command = getenv("CNI_COMMAND");
    if (command == NULL || *command == '\0') {
        print(STDERR_FILENO, about, sizeof about - 1);
        return 0;
    }
    size_t variables = OWN_VARIABLES + 1;
    for (char **variable = environ; *variable != NULL; variable++)
        variables++;
    struct call *call =
        mmap(NULL, sizeof *call + variables * sizeof(char *), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (call == MAP_FAILED)
        return refuse((const char *[]){"no memory for the call: ", strerror(errno), NULL});
    gather(call, environ);
    /* VERSION has no configuration; a runtime may leave stdin open. */
    if (strcmp(command, "VERSION") != 0 && !read_stdin(call, STDIN_FILENO))
        return 1;
    find_directory(call->directory);
    if (ask(call, command))
        return print(STDOUT_FILENO, call->answer, call->reply.size) ? call->reply.status : 1;
    return fail(call, command, run_bundle(call));
}
