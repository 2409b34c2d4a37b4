/* Streams, events and captures of graphs.
 *
 * Work is done when it is asked for, so streams have nothing to wait for: of order only the rules
 * of captures are left. They are those of the CUDA documentation (cudaStreamBeginCapture,
 * cudaThreadExchangeStreamCaptureMode and "Prohibited and Unhandled Operations" in the
 * programming guide).
 */

#define _GNU_SOURCE
#include "streams.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define IPC_HANDLE_BYTES 64

/* Handles of what is destroyed stay known as such: nothing is given back to malloc. */
struct stream legacy = {.kind = STREAM};
struct capture *captures;
pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
_Thread_local int thread_mode = GLOBAL;

struct stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &legacy; /* and the two constants for default streams */
    struct stream *stream = handle;
    return stream->kind == STREAM ? stream : NULL;
}

static struct event *event_of(void *handle) {
    struct event *event = handle;
    return event && event->kind == EVENT ? event : NULL;
}

int no_handle(const char *what) { return refuse(INVALID_HANDLE, "no such %s", what); }

int lose(struct capture *capture, int code, const char *why) {
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
    pthread_mutex_lock(&streams_lock);
    struct capture *capture = forbidding();
    if (capture) code = lose(capture, CAPTURE_UNSUPPORTED, name);
    pthread_mutex_unlock(&streams_lock);
    return code;
}

/* The default stream would wait for streams that are not independent of it. */
struct capture *implicit(const struct stream *stream) {
    if (stream != &legacy) return NULL;
    for (struct stream *at = &legacy; at; at = at->next) {
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
    pthread_mutex_lock(&streams_lock);
    code = begin_on(stream, is_captured);
    pthread_mutex_unlock(&streams_lock);
    return code;
}

int stream_create(void **handle, unsigned flags, int priority) {
    int code = check_context();
    if (code) return code;
    if (flags > NON_BLOCKING_STREAM) return refuse(INVALID_VALUE, "stream of flags %u", flags);
    struct stream *stream = calloc(1, sizeof *stream);
    *stream = (struct stream){.kind = STREAM, .flags = flags, .priority = priority};
    pthread_mutex_lock(&streams_lock);
    stream->next = legacy.next;
    legacy.next = stream;
    pthread_mutex_unlock(&streams_lock);
    *handle = stream;
    return OK;
}

int stream_destroy(void *handle) {
    struct stream *stream = stream_of(handle);
    if (!stream || stream == &legacy) return no_handle("stream");
    pthread_mutex_lock(&streams_lock);
    stream->kind = 0;
    for (struct stream *at = &legacy; at; at = at->next) {
        if (at->next == stream) at->next = stream->next;
    }
    pthread_mutex_unlock(&streams_lock);
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
    pthread_mutex_lock(&streams_lock);
    struct capture *capture = stream->capture ? stream->capture : implicit(stream);
    if (capture) code = lose(capture, stream->capture ? CAPTURE_UNSUPPORTED : CAPTURE_IMPLICIT, name);
    pthread_mutex_unlock(&streams_lock);
    return code;
}

int device_synchronize(const char *name) {
    int code = check_context();
    if (code) return code;
    pthread_mutex_lock(&streams_lock);
    for (struct capture *at = captures; at; at = at->next) {
        code = lose(at, CAPTURE_UNSUPPORTED, name);
    }
    pthread_mutex_unlock(&streams_lock);
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
    pthread_mutex_lock(&streams_lock);
    code = join(stream, event);
    pthread_mutex_unlock(&streams_lock);
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
