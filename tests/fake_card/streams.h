/* What streams.c and captures.c share. */

#ifndef STREAMS_H
#define STREAMS_H

#include "card.h"

#include <pthread.h>
#include <time.h>

#define STREAM 0x5374726d
#define EVENT 0x4576656e
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

/* Streams in a list that begins with the default one; captures under way. */
extern struct stream legacy;
extern struct capture *captures;
extern pthread_mutex_t streams_lock;
extern _Thread_local int thread_mode;

struct stream *stream_of(void *handle);
int no_handle(const char *what);
/* The code; the capture can only be ended. */
int lose(struct capture *capture, int code, const char *why);
/* A capture that work on this stream would have to be ordered with. */
struct capture *implicit(const struct stream *stream);

#endif
