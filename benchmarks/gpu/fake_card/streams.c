/* Streams, events and captures of graphs.
 *
 * Work is done when it is asked for, so streams have nothing to wait for: of order only the rules
 * of captures are left. They are those of the CUDA documentation (cudaStreamBeginCapture,
 * cudaThreadExchangeStreamCaptureMode and "Prohibited and Unhandled Operations" in the
 * programming guide).
 */

#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STREAM 0x5374726d
#define EVENT 0x4576656e
#define GRAPH 0x47726168
#define IPC_HANDLE_BYTES 64
enum { NON_BLOCKING_STREAM = 1 };
enum { NO_TIMING = 2, INTERPROCESS = 4, KNOWN_EVENT_FLAGS = 7 };
enum { EXTERNAL = 1 };

struct capture {
    unsigned long long id;
    int mode;
    bool is_lost;
    size_t num_nodes;
    struct stream *origin;
    pthread_t thread;
    struct capture *next; /* of those under way */
};

struct stream {
    uint32_t kind;
    unsigned flags;
    int priority;
    struct capture *capture;
    uint64_t num_done; /* operations in this capture */
    uint64_t num_joined; /* of them, those that another stream has waited for */
    struct stream *next;
};

struct event {
    uint32_t kind;
    unsigned flags;
    bool is_recorded, is_imported;
    struct capture *capture; /* of the stream when it was recorded */
    struct stream *stream;
    uint64_t num_done;
    struct timespec at;
};

struct graph {
    uint32_t kind;
    size_t num_nodes;
};

/* Handles of what is destroyed stay known as such: nothing is given back to malloc. */
static struct stream legacy = {.kind = STREAM};
static struct stream *streams = &legacy;
static struct capture *captures;
static unsigned long long num_captures;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int thread_mode = GLOBAL;

static struct stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &legacy; /* and the two constants for default streams */
    struct stream *stream = handle;
    return stream->kind == STREAM ? stream : NULL;
}

static struct event *event_of(void *handle) {
    struct event *event = handle;
    return event && event->kind == EVENT ? event : NULL;
}

static int no_handle(const char *what) { return refuse(INVALID_HANDLE, "no such %s", what); }

static int lose(struct capture *capture, int code, const char *why) {
    capture->is_lost = true;
    return refuse(code, "%s; the capture is lost", why);
}

/* Whether the calling thread may make calls that could wait for others, see
 * cudaThreadExchangeStreamCaptureMode. */
static struct capture *forbidding(void) {
    for (struct capture *at = captures; at; at = at->next) {
        bool is_own = pthread_equal(at->thread, pthread_self());
        if (thread_mode == RELAXED || at->mode == RELAXED) continue;
        if (is_own || (thread_mode == GLOBAL && at->mode == GLOBAL)) return at;
    }
    return NULL;
}

int begin_unsafe(const char *name) {
    int code = check_context();
    if (code) return code;
    pthread_mutex_lock(&lock);
    struct capture *capture = forbidding();
    if (capture) code = lose(capture, CAPTURE_UNSUPPORTED, name);
    pthread_mutex_unlock(&lock);
    return code;
}

/* The default stream would wait for streams that are not independent of it. */
static struct capture *implicit(const struct stream *stream) {
    if (stream != &legacy) return NULL;
    for (struct stream *at = streams; at; at = at->next) {
        if (at->capture && !(at->flags & NON_BLOCKING_STREAM)) return at->capture;
    }
    return NULL;
}

static int begin_on(struct stream *stream, bool *is_captured) {
    struct capture *capture = implicit(stream);
    if (capture) return lose(capture, CAPTURE_IMPLICIT, "work on the default stream");
    if (stream->capture) {
        if (stream->capture->is_lost) return CAPTURE_INVALIDATED;
        stream->capture->num_nodes++;
        stream->num_done++;
        *is_captured = true;
    }
    return OK;
}

int begin_work(void *handle, bool *is_captured) {
    *is_captured = false;
    int code = check_context();
    struct stream *stream = stream_of(handle);
    if (code) return code;
    if (!stream) return no_handle("stream");
    pthread_mutex_lock(&lock);
    code = begin_on(stream, is_captured);
    pthread_mutex_unlock(&lock);
    return code;
}

int stream_create(void **handle, unsigned flags, int priority) {
    int code = check_context();
    if (code) return code;
    if (flags > NON_BLOCKING_STREAM) return refuse(INVALID_VALUE, "stream of flags %u", flags);
    struct stream *stream = calloc(1, sizeof *stream);
    *stream = (struct stream){.kind = STREAM, .flags = flags, .priority = priority};
    pthread_mutex_lock(&lock);
    stream->next = legacy.next;
    legacy.next = stream;
    pthread_mutex_unlock(&lock);
    *handle = stream;
    return OK;
}

int stream_destroy(void *handle) {
    struct stream *stream = stream_of(handle);
    if (!stream || stream == &legacy) return no_handle("stream");
    pthread_mutex_lock(&lock);
    stream->kind = 0;
    for (struct stream *at = streams; at; at = at->next) {
        if (at->next == stream) at->next = stream->next;
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

int stream_priority(void *handle, int *priority) {
    struct stream *stream = stream_of(handle);
    if (!stream) return no_handle("stream");
    *priority = stream->priority;
    return OK;
}

int stream_synchronize(void *handle, const char *name) {
    int code = check_context();
    struct stream *stream = stream_of(handle);
    if (code) return code;
    if (!stream) return no_handle("stream");
    pthread_mutex_lock(&lock);
    struct capture *capture = stream->capture ? stream->capture : implicit(stream);
    if (capture) code = lose(capture, stream->capture ? CAPTURE_UNSUPPORTED : CAPTURE_IMPLICIT, name);
    pthread_mutex_unlock(&lock);
    return code;
}

int device_synchronize(const char *name) {
    int code = check_context();
    if (code) return code;
    pthread_mutex_lock(&lock);
    for (struct capture *at = captures; at; at = at->next) {
        code = lose(at, CAPTURE_UNSUPPORTED, name);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

static int join(struct stream *stream, struct event *event) {
    struct capture *capture = event->capture;
    if (!capture) {
        if (!stream->capture || !event->is_recorded) return OK;
        return lose(stream->capture, CAPTURE_ISOLATION, "wait for an event from before");
    }
    if (!capture->origin) return refuse(CAPTURED_EVENT, "wait for an event of a capture");
    if (stream->capture && stream->capture != capture) {
        return lose(capture, CAPTURE_MERGE, "wait for another capture");
    }
    if (implicit(stream)) return lose(capture, CAPTURE_IMPLICIT, "the default stream waits");
    if (!stream->capture) {
        stream->capture = capture;
        stream->num_done = stream->num_joined = 0;
    }
    stream->num_done++;
    if (event->stream != stream && event->stream->num_joined < event->num_done) {
        event->stream->num_joined = event->num_done;
    }
    return capture->is_lost ? CAPTURE_INVALIDATED : OK;
}

int stream_wait(void *handle, void *event_handle, unsigned flags) {
    int code = check_context();
    struct stream *stream = stream_of(handle);
    struct event *event = event_of(event_handle);
    if (code) return code;
    if (!stream || !event) return no_handle("stream or event");
    if (flags & EXTERNAL) return OK;
    pthread_mutex_lock(&lock);
    code = join(stream, event);
    pthread_mutex_unlock(&lock);
    return code;
}

int event_create(void **handle, unsigned flags) {
    int code = check_context();
    if (code) return code;
    if (flags > KNOWN_EVENT_FLAGS || (flags & INTERPROCESS && !(flags & NO_TIMING))) {
        return refuse(INVALID_VALUE, "event of flags %u", flags);
    }
    struct event *event = calloc(1, sizeof *event);
    event->kind = EVENT;
    event->flags = flags;
    *handle = event;
    return OK;
}

int event_destroy(void *handle) {
    struct event *event = event_of(handle);
    if (!event) return no_handle("event");
    event->kind = 0;
    return OK;
}

int event_record(void *handle, void *stream_handle, unsigned flags) {
    bool is_captured;
    struct event *event = event_of(handle);
    struct stream *stream = stream_of(stream_handle);
    if (!event) return no_handle("event");
    int code = begin_work(stream_handle, &is_captured);
    if (code || (is_captured && flags & EXTERNAL)) return code;
    if (event->is_imported && is_captured) return refuse(INVALID_HANDLE, "record of another's event");
    event->is_recorded = true;
    event->capture = stream->capture;
    event->stream = stream;
    event->num_done = stream->num_done;
    clock_gettime(CLOCK_MONOTONIC, &event->at);
    return OK;
}

int event_query(void *handle, const char *name) {
    struct event *event = event_of(handle);
    if (!event) return no_handle("event");
    int code = begin_unsafe(name);
    if (code == OK && event->capture) {
        event->capture->is_lost = true;
        code = refuse(CAPTURED_EVENT, "%s of an event of a capture", name);
    }
    return code;
}

int event_elapsed(float *milliseconds, void *start, void *end) {
    struct event *from = event_of(start), *to = event_of(end);
    if (!from || !to || !from->is_recorded || !to->is_recorded ||
        (from->flags | to->flags) & NO_TIMING) {
        return refuse(INVALID_HANDLE, "no time between these events");
    }
    *milliseconds = (float)((double)(to->at.tv_sec - from->at.tv_sec) * 1e3 +
                            (double)(to->at.tv_nsec - from->at.tv_nsec) * 1e-6);
    return OK;
}

/* Between processes. What an event stands for has been done when it is recorded, so the other
 * process has nothing to wait for either; handles are checked. */

struct ipc_handle {
    uint64_t kind, process, event;
};

int event_export(char *handle, void *event_handle) {
    struct event *event = event_of(event_handle);
    if (!event) return no_handle("event");
    if (!(event->flags & INTERPROCESS) || event->is_imported) {
        return refuse(INVALID_HANDLE, "the event is not for other processes");
    }
    struct ipc_handle made = {EVENT, (uint64_t)getpid(), (uint64_t)event};
    memset(handle, 0, IPC_HANDLE_BYTES);
    memcpy(handle, &made, sizeof made);
    return OK;
}

int event_import(void **event_handle, const char *handle) {
    struct ipc_handle known;
    memcpy(&known, handle, sizeof known);
    if (known.kind != EVENT) return refuse(INVALID_VALUE, "no handle of an event");
    if (known.process == (uint64_t)getpid()) {
        return refuse(INVALID_CONTEXT, "the event is this process's own");
    }
    if (kill((pid_t)known.process, 0) < 0) {
        return refuse(MAP_FAILED_CODE, "process %lu, which had the event, is gone", known.process);
    }
    int code = event_create(event_handle, NO_TIMING | INTERPROCESS);
    if (code == OK) event_of(*event_handle)->is_imported = true;
    return code;
}

/* Captures. */

int capture_begin(void *handle, int mode) {
    int code = check_context();
    struct stream *stream = stream_of(handle);
    if (code) return code;
    if (!stream) return no_handle("stream");
    if (stream == &legacy) return refuse(CAPTURE_UNSUPPORTED, "capture on the default stream");
    if (stream->capture) return refuse(INVALID_VALUE, "the stream captures already");
    struct capture *capture = calloc(1, sizeof *capture);
    pthread_mutex_lock(&lock);
    *capture = (struct capture){.id = ++num_captures, .mode = mode, .origin = stream,
                                .thread = pthread_self(), .next = captures};
    captures = capture;
    stream->capture = capture;
    stream->num_done = stream->num_joined = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* All streams leave the capture; whether each has been waited for. */
static bool leave(struct capture *capture) {
    bool is_joined = true;
    for (struct stream *at = streams; at; at = at->next) {
        if (at->capture != capture) continue;
        if (at != capture->origin && at->num_joined < at->num_done) is_joined = false;
        at->capture = NULL;
    }
    for (struct capture **at = &captures; *at; at = &(*at)->next) {
        if (*at != capture) continue;
        *at = capture->next;
        break;
    }
    capture->origin = NULL; /* it is over: events may still name it */
    return is_joined;
}

static int end(struct stream *stream, void **graph_handle) {
    struct capture *capture = stream->capture;
    if (!capture) return refuse(INVALID_VALUE, "the stream captures nothing");
    if (capture->origin != stream) return lose(capture, CAPTURE_UNMATCHED, "end of another's capture");
    if (capture->mode != RELAXED && !pthread_equal(capture->thread, pthread_self())) {
        return lose(capture, CAPTURE_WRONG_THREAD, "end by another thread");
    }
    bool is_joined = leave(capture);
    if (capture->is_lost) return refuse(CAPTURE_INVALIDATED, "a capture ends that is lost");
    if (!is_joined) return refuse(CAPTURE_UNJOINED, "a stream of the capture was not waited for");
    struct graph *graph = calloc(1, sizeof *graph);
    *graph = (struct graph){GRAPH, capture->num_nodes};
    *graph_handle = graph;
    return OK;
}

int capture_end(void *handle, void **graph) {
    struct stream *stream = stream_of(handle);
    *graph = NULL;
    if (!stream) return no_handle("stream");
    pthread_mutex_lock(&lock);
    int code = end(stream, graph);
    pthread_mutex_unlock(&lock);
    return code;
}

int capture_info(void *handle, int *status, unsigned long long *id) {
    struct stream *stream = stream_of(handle);
    if (!stream) return no_handle("stream");
    pthread_mutex_lock(&lock);
    int code = implicit(stream) ? CAPTURE_IMPLICIT : OK;
    struct capture *capture = stream->capture;
    *status = !capture ? 0 : capture->is_lost ? 2 : 1;
    if (capture && id) *id = capture->id;
    pthread_mutex_unlock(&lock);
    return code;
}

int capture_exchange_mode(int *mode) {
    if (*mode < GLOBAL || *mode > RELAXED) return refuse(INVALID_VALUE, "mode %d", *mode);
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

static struct graph *graph_of(void *handle) {
    struct graph *graph = handle;
    return graph && graph->kind == GRAPH ? graph : NULL;
}

int graph_instantiate(void **executable, void *handle) {
    struct graph *graph = graph_of(handle), *made;
    if (!graph) return no_handle("graph");
    made = calloc(1, sizeof *made);
    *made = *graph;
    *executable = made;
    return OK;
}

int graph_launch(void *handle, void *stream) {
    bool is_captured;
    if (!graph_of(handle)) return no_handle("graph");
    return begin_work(stream, &is_captured);
}

int graph_num_nodes(void *handle, size_t *count) {
    struct graph *graph = graph_of(handle);
    if (!graph) return no_handle("graph");
    *count = graph->num_nodes;
    return OK;
}

int graph_destroy(void *handle) {
    struct graph *graph = graph_of(handle);
    if (!graph) return no_handle("graph");
    graph->kind = 0;
    return OK;
}
