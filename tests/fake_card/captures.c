/* Captures of graphs, from their begin to their end, and graphs, which launch nothing. */

#include "streams.h"

#include <stdlib.h>

#define GRAPH 0x47726168

struct graph {
    uint32_t kind;
    size_t num_nodes;
};

static unsigned long long num_captures;

int capture_begin(void *handle, int mode) {
    int code = check_context();
    struct stream *stream = stream_of(handle);
    if (code) return code;
    if (!stream) return no_handle("stream");
    if (stream == &legacy) return refuse(CAPTURE_UNSUPPORTED, "capture on the default stream");
    if (stream->capture) return refuse(INVALID_VALUE, "the stream captures already");
    struct capture *capture = calloc(1, sizeof *capture);
    pthread_mutex_lock(&streams_lock);
    *capture = (struct capture){.id = ++num_captures, .mode = mode, .origin = stream,
                                .thread = pthread_self(), .next = captures};
    captures = capture;
    stream->capture = capture;
    stream->num_done = stream->num_joined = 0;
    pthread_mutex_unlock(&streams_lock);
    return OK;
}

/* All streams leave the capture; whether each has been waited for. */
static bool leave(struct capture *capture) {
    bool is_joined = true;
    for (struct stream *at = &legacy; at; at = at->next) {
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
    pthread_mutex_lock(&streams_lock);
    int code = end(stream, graph);
    pthread_mutex_unlock(&streams_lock);
    return code;
}

int capture_info(void *handle, int *status, unsigned long long *id) {
    struct stream *stream = stream_of(handle);
    if (!stream) return no_handle("stream");
    pthread_mutex_lock(&streams_lock);
    int code = implicit(stream) ? CAPTURE_IMPLICIT : OK;
    struct capture *capture = stream->capture;
    *status = !capture ? 0 : capture->is_lost ? 2 : 1;
    if (capture && id) *id = capture->id;
    pthread_mutex_unlock(&streams_lock);
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
