/* What the parts of the fake card have in common. What it is: __init__.py. */

#ifndef CARD_H
#define CARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB (1UL << 20)

/* CUresult, as cuda.h has it; errors of the runtime have the same numbers. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_CODE = 205,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

/* The code, after a line on standard error that says what was wrong. */
int refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* OK where cuInit was called, by this process itself. A forked child must not go on with its
 * parent's CUDA. */
int check_process(void);
/* The same, and the calling thread has a context. */
int check_context(void);
/* The context becomes the thread's, as each call of the runtime does it. */
int enter_context(void);

/* Ranges of addresses, sorted, none inside another. */
struct range {
    uint64_t start, size;
    uint32_t memory;    /* behind a mapping */
    bool is_accessible; /* a mapping, after cuMemSetAccess */
    bool is_allocation; /* a reservation that cuMemAlloc made; host memory of cuMemHostAlloc */
};

/* Memory of the device (memory.c) and of the host (host.c). */
int card_init_memory(void);
void card_take_context_bytes(void);
void card_memory_info(size_t *free_bytes, size_t *total_bytes);
int card_allocate(uint64_t *address, size_t size);
int card_free(uint64_t address);
/* 1 where all bytes can be used, 0 where none is the device's, -1 for anything else. */
int card_is_device(uint64_t address, size_t size);
/* The same of host memory: 1 inside one registration, 0 in none, -1 across an end of one. */
int card_is_pinned(uint64_t address, size_t size);
int card_register(uint64_t address, size_t size);
int card_unregister(uint64_t address);
int card_allocate_host(void **address, size_t size);
int card_free_host(void *address);

enum direction { ANY_WAY, TO_DEVICE, TO_HOST };
/* The bytes are there when it returns. */
int card_copy(uint64_t target, uint64_t source, size_t size, enum direction direction);
int card_fill(uint64_t target, uint32_t value, size_t width, size_t count);

/* Streams, events and captures (streams.c, captures.c); handles are those of the API. */
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
/* Before work of a stream. When it is OK and the stream captures, ``is_captured`` is set: the
 * work is then noted and must not be done. */
int begin_work(void *stream, bool *is_captured);
/* Before a call that may wait for other work: a capture forbids it, and is lost if it is made. */
int begin_unsafe(const char *name);
int stream_create(void **stream, unsigned flags, int priority);
int stream_destroy(void *stream);
int stream_wait(void *stream, void *event, unsigned flags);
int stream_synchronize(void *stream, const char *name);
int device_synchronize(const char *name);
int stream_priority(void *stream, int *priority);
int event_create(void **event, unsigned flags);
int event_destroy(void *event);
int event_record(void *event, void *stream, unsigned flags);
int event_query(void *event, const char *name);
int event_elapsed(float *milliseconds, void *start, void *end);
int event_export(char *handle, void *event);
int event_import(void **event, const char *handle);
int capture_begin(void *stream, int mode);
int capture_end(void *stream, void **graph);
int capture_info(void *stream, int *status, unsigned long long *id);
int capture_exchange_mode(int *mode);
int graph_instantiate(void **executable, void *graph);
int graph_launch(void *executable, void *stream);
int graph_num_nodes(void *graph, size_t *count);
int graph_destroy(void *graph);

/* Facts (driver.c). */
int device_attribute(int *value, int attribute);
/* The card's function of that name, in its latest form; NULL where it has none. */
void *find_function(const char *name);
const char *error_text(int code);
const char *error_name(int code);

#endif
